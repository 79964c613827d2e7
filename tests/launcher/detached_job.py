"""Detached jobs on this machine, and the commands that reach them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from dslaunch.launcher.command_line.jobs import command as jobs_command
from tests.launcher.local_job import FORGOTTEN, TIMEOUT_S, Job, poll


class Told:
    """What a command printed, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def __repr__(self) -> str:
        return f"exit code {self.code}\n{self.out}\n{self.err}"


def environment(folder: Path) -> dict[str, str]:
    """That of local_job.Job, without its mark: what it starts does not count as part of the job."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(FORGOTTEN)}
    return base | {
        "HOME": str(folder / "home"),
        "XDG_STATE_HOME": str(folder / "state"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def tell(folder: Path, *words: str, timeout_s: float = TIMEOUT_S, **env: str) -> Told:
    """Run `dslaunch WORDS...` as the user whose jobs are in this folder."""
    ended = subprocess.run(
        [sys.executable, "-m", "dslaunch", *words],
        cwd=folder,
        env=environment(folder) | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )
    code = ended.returncode if ended.returncode >= 0 else 128 - ended.returncode
    out, err = (one.decode("utf-8", "surrogateescape") for one in (ended.stdout, ended.stderr))
    return Told(code, out, err)


def jobs(folder: Path) -> list[dict[str, Any]]:
    """What `dslaunch jobs --all --json` prints; it is asked often, so in this process."""
    state = {"HOME": str(folder / "home"), "XDG_STATE_HOME": str(folder / "state")}
    with mock.patch.dict(os.environ, state), contextlib.redirect_stdout(io.StringIO()) as out:
        assert jobs_command.callback is not None
        assert jobs_command.callback(all=True, json=True) == 0
    found: list[dict[str, Any]] = json.loads(out.getvalue())
    return found


def job(folder: Path, name: str) -> dict[str, Any]:
    (found,) = [one for one in jobs(folder) if one["name"] == name]
    return found


def wait_for_state(folder: Path, name: str, state: str) -> dict[str, Any]:
    poll(lambda: job(folder, name)["state"] == state, f"{name} {state}: {jobs(folder)}")
    return job(folder, name)


def wait_for_line(folder: Path, name: str, text: str) -> None:
    words = text.rpartition(" | ")[2].encode()
    poll(lambda: any(words in one.read_bytes() for one in folder.glob("state/dslaunch/jobs/*/journal")), text)
    poll(lambda: text in tell(folder, "logs", name).out, f"{text!r} in {tell(folder, 'logs', name)}")


class Terminal:
    """A command in a terminal of its own, as its session's leader."""

    def __init__(self, folder: Path, words: Sequence[str], **env: str) -> None:
        self._text = b""
        self.pid, self._fd = pty.fork()
        if not self.pid:
            os.chdir(folder)
            os.execve(words[0], list(words), environment(folder) | {"COLUMNS": "200", "TERM": "xterm"} | env)

    @classmethod
    def dslaunch(cls, folder: Path, *words: str, **env: str) -> Terminal:
        return cls(folder, [sys.executable, "-m", "dslaunch", *words], **env)

    def read(self) -> str:
        """All that was shown so far."""
        try:
            os.set_blocking(self._fd, False)
            while data := os.read(self._fd, 1 << 16):
                self._text += data
        except OSError:  # nothing now, or the other end is closed
            pass
        return self._text.decode("utf-8", "surrogateescape")

    def wait_for(self, text: str, *, times: int = 1) -> None:
        poll(lambda: self.read().count(text) >= times, f"{text!r} x {times} in {self.read()}")

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def hang_up(self) -> None:
        """The window is closed: SIGHUP to all that is in it."""
        os.close(self._fd)
        os.waitpid(self.pid, 0)

    def wait(self) -> int:
        """The exit code."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            self.read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.read()
                os.close(self._fd)
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            time.sleep(0.01)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"did not end within {TIMEOUT_S:g} s\n{self.read()}")


def name_of(started: Job) -> str:
    """What a job that was started with --detach is called; it has started."""
    assert started.wait() == 0, started.err
    return started.out.strip()
