"""The agent of this machine: a child process and its pipes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading

import psutil

from ..bootstrap import READ_LOADER

READ_BYTES = 1 << 18
ERROR_TEXT_BYTES = 4096


class LocalChannel:
    """A bootstrap started on this machine, in a session of its own: a terminal's Ctrl-C reaches the launcher only."""

    local_address = ""

    def __init__(self, *, end_within_s: float) -> None:
        self._end_within_s = end_within_s
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the channel
        self._errors_lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-u", "-c", READ_LOADER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            env=_environment_we_got(),
            start_new_session=True,
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise AssertionError("Popen gave no pipes")
        self._in, self._out = self._process.stdin, self._process.stdout

    def read(self) -> bytes:
        return os.read(self._out.fileno(), READ_BYTES)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._in.write(view) or 0 :]

    def error_text(self) -> str:
        with self._errors_lock:
            if self._errors.closed:  # by the thread that closed the channel, when nobody needs to know why
                return ""
            self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, self._errors.tell() - ERROR_TEXT_BYTES))
            return self._errors.read().decode("utf-8", "replace")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._in.close()
        try:
            self._process.wait(self._end_within_s)
        except subprocess.TimeoutExpired:
            self._kill_tree()
        with self._errors_lock:
            self._errors.close()

    def _kill_tree(self) -> None:
        """The agent does not end by itself: take everything below it along."""
        with contextlib.suppress(psutil.NoSuchProcess):
            keeper = psutil.Process(self._process.pid)
            for process in (keeper, *keeper.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait()


def _environment_we_got() -> dict[bytes, bytes]:
    """os.environ without the LC_CTYPE that Python sets for itself in the C locale: the workers inherit this."""
    env = dict(os.environb)
    with open("/proc/self/environ", "rb") as file:
        if b"\0LC_CTYPE=" not in b"\0" + file.read():
            env.pop(b"LC_CTYPE", None)
    return env
