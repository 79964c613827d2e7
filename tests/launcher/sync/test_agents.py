"""Real agents, of every Python that may be on a host, on this machine: the folder as they make it."""

from __future__ import annotations

import os
import queue
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dslaunch.launcher.backends.bootstrap import READ_LOADER, WANTS_TEXT, AgentParts, agent_source, agent_text
from dslaunch.launcher.sync.sender import Tree
from dslaunch.launcher.wire.frames import MAGIC, Decoder, Frame, Synced, encode
from tests.launcher.sync.pair import HostHere, sync, tree_of

PYENV = Path.home() / ".pyenv/versions"
OLDEST = next(
    (str(one) for one in sorted(PYENV.glob("3.8.*/bin/python3.8"))), shutil.which("python3.8") or ""
)


def agent_of(python: str) -> type[HostHere]:
    class Agent(HostHere):
        def __init__(self, name: str, said: queue.SimpleQueue[tuple[HostHere, Frame]]) -> None:
            super().__init__(name, said)
            words = [python, "-I", "-S", "-u", "-c", READ_LOADER]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, bufsize=0)
            self._write(agent_source(AgentParts(moves_files=True)))
            self._has_begun = threading.Event()
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
            assert self._has_begun.wait(20)  # before that, nothing may come between the agent and its source

        def _write(self, data: bytes) -> None:
            assert self._process.stdin is not None
            view = memoryview(data)
            while view:
                view = view[self._process.stdin.write(view) or 0 :]

        def _read(self) -> None:
            assert self._process.stdout is not None
            noise, decoder = b"", Decoder()
            while data := os.read(self._process.stdout.fileno(), 1 << 16):
                if MAGIC not in noise:
                    noise += data
                    if WANTS_TEXT in noise:
                        noise = b""
                        self._write(agent_text(AgentParts(moves_files=True)))
                    data = noise.partition(MAGIC)[2]
                if MAGIC in noise:
                    self._has_begun.set()
                for frame in decoder.feed(data):
                    self._said.put((self, frame))

        def send(self, *frames: Frame) -> None:
            data = b"".join(map(encode, frames))
            self.num_bytes += len(data)
            self._write(data)

        def close(self) -> None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            assert self._process.wait(20) == 0
            self._reader.join(20)
            self._process.stdout.close()

    return Agent


@pytest.mark.parametrize("python", [sys.executable, OLDEST], ids=["this", "oldest"])
def test_agents_make_the_folder(tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not python:
        pytest.skip("there is no Python 3.8 here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here, many = tmp_path / "here", [tmp_path / f"there{number}" for number in range(3)]
    here.mkdir()
    draw = random.Random(1)
    for number in range(10):
        (here / f"file{number}").write_bytes(draw.randbytes(number * 100_000))
    (here / "link").symlink_to("file1")
    for tree in (Tree(), Tree(above_hosts=0, above_bytes=0)):
        hosts = sync(here, *many, tree=tree, hosts=agent_of(python))
        for host, there in zip(hosts, many, strict=True):
            assert isinstance(host.end, Synced), host.end
            assert tree_of(there) == tree_of(here)
            shutil.rmtree(there)
