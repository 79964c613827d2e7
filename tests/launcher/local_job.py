"""A `dslaunch` command on this machine: a child process with real workers,
found again by a mark in its environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

TIMEOUT_S = 30.0
AT_ONCE_S = 20.0  # the grace of 30 s was not waited for, however busy the machine is
MARK = "DSLAUNCH_TEST_JOB"  # inherited by every process of a job, so its survivors can be found
FORGOTTEN = ("CUDA_", "DS_ENV", "OMP_", "PYTHON", "NCCL", "LC_", "LANG", "DSLAUNCH", "NO_COLOR", "COV_CORE")

WORKER = """
import os, signal, subprocess, sys, time
rank = int(os.environ.get('RANK', 0))

def say(*words):
    os.write(1, ' '.join(map(str, words)).encode() + b'\\n')

def wait():
    while True: signal.pause()

def escape():
    '''Leave a process in a session of its own, with other parents, that ends with SIGKILL only.'''
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            os.write(write, b'.')
            wait()
        os._exit(0)
    os.wait()
    os.read(read, 1)
"""


def poll(is_so: Callable[[], Any], what: str | Callable[[], str], timeout_s: float = TIMEOUT_S) -> None:
    """Wait until something is so; `what` is what was waited for, put into words when that was in vain. A look
    at all processes is not cheap: three times as long as it took nothing is done.
    """
    looked_at = time.monotonic()
    deadline = looked_at + timeout_s
    while not is_so():
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what() if callable(what) else what}")
        time.sleep(max(0.005, 3 * (now - looked_at)))
        looked_at = time.monotonic()


class Job:
    """A `dslaunch` command in `folder`. Its stdout and stderr go to files there, unless said otherwise."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[str | bytes],
        *,
        env: Mapping[str, str] | None = None,
        shell: str = 'exec "$@"',
        stdout: int | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self.folder = folder
        self._mark = f"{MARK}={uuid.uuid4()}".encode()
        base = {name: value for name, value in os.environ.items() if not name.startswith(FORGOTTEN)}
        home = folder / "home"
        home.mkdir(exist_ok=True)
        base.update(HOME=str(home), PYTHONDONTWRITEBYTECODE="1", **(env or {}))
        name, _, value = self._mark.decode().partition("=")
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", shell, "sh", sys.executable, "-m", "dslaunch", *words],
                cwd=folder,
                env={**base, name: value},
                stdin=stdin,
                stdout=out if stdout is None else stdout,
                stderr=err,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return self._out.read_text("utf-8", "surrogateescape")

    @property
    def err(self) -> str:
        return self._err.read_text("utf-8", "surrogateescape")

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """The exit code as a shell gives it."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {timeout_s:g} s\n{self.out}\n{self.err}") from None
        return code if code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait_for(self, text: str, *, times: int = 1) -> None:
        """Until stdout shows the text so many times."""
        poll(lambda: self.out.count(text) >= times, lambda: f"{text!r} x {times} in\n{self.out}\n{self.err}")

    def wait_for_err(self, text: str) -> None:
        poll(lambda: text in self.err, lambda: f"{text!r} in\n{self.err}")

    def lines(self, rank: int) -> list[str]:
        prefix = f"localhost:{rank} | "
        return [line.removeprefix(prefix) for line in self.out.split("\n") if line.startswith(prefix)]

    def survivors(self) -> list[int]:
        """Every process of this job that runs, the launcher included."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if self._mark in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
        return found

    def keeper(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def agent(self) -> psutil.Process:
        (child,) = self.keeper().children()
        return child

    def assert_nothing_is_left(self, timeout_s: float = TIMEOUT_S) -> None:
        poll(lambda: not self.survivors(), f"the end of {self.survivors()}\n{self.err}", timeout_s)

    def end(self) -> None:
        for _ in range(1000):
            left = self.survivors()
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


Start = Callable[..., Job]


def assert_short(job: Job) -> None:
    """What went wrong is said in sentences."""
    assert "Traceback" not in job.err
    assert "Exception" not in job.err
