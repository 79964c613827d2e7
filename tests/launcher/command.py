"""A `dslaunch` command running on a host of the lab, and what it printed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from tests.lab import Host

TIMEOUT_S = 60.0
AT_ONCE_S = 20.0  # no time limit of the job (30 s and more) was waited for
# on top of a time that is promised: other tests keep the machine busy, an idle one takes below 0.5 s
BUSY_S = 10.0
# For a test with the fixture `way`: both in `make test`.
BOTH_WAYS = pytest.mark.parametrize("way", ["ssh", "openssh"], indirect=True)


class Command:
    """Starts `dslaunch WORDS...` on a host, in `folder` unless `cwd` is given;
    its output goes to files in `folder`.
    """

    way: ClassVar[tuple[str, ...]] = ()  # words for every command: the tests of a file by another launcher

    def __init__(
        self,
        host: Host,
        folder: Path,
        *words: str,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        python: str = sys.executable,
    ) -> None:
        self._out = folder / f"out-{id(self)}"
        self._err = folder / f"err-{id(self)}"
        self.began_at = time.monotonic()
        head = words[:1] if words[:1] in (("exec",), ("check",)) else ()
        words = (*head, *self.way, *words[len(head) :])
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = host.popen(
                [python, "-m", "dslaunch", *words],
                cwd=cwd or str(folder),
                env=dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def out(self) -> str:
        return self._out.read_text("utf-8", "surrogateescape")

    @property
    def err(self) -> str:
        return self._err.read_text("utf-8", "surrogateescape")

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """The exit code; a command that does not end is a failure that shows what it printed."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"did not end within {timeout_s} s\n{self.out}\n{self.err}") from None

    def wait_for(self, text: str, *, times: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        """Until stdout shows `text` so many times."""
        poll(lambda: self.out.count(text) >= times, f"{text!r} x {times}", self, timeout_s)

    def lines(self, prefix: str) -> list[str]:
        """The lines of stdout from one rank, e.g. `node1:0`."""
        mark = f"{prefix} | "
        return [line.removeprefix(mark) for line in self.out.splitlines() if line.startswith(mark)]


def poll(is_there: Callable[[], bool], what: str, command: Command, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until something is so, or fail saying what was waited for and what the command printed."""
    looked_at = time.monotonic()
    deadline = looked_at + timeout_s
    while not is_there():
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"waited {timeout_s} s for {what}\n{command.out}\n{command.err}")
        time.sleep(max(0.01, 3 * (now - looked_at)))
        looked_at = time.monotonic()
