"""One lab per machine at a time: a lock file that is free again as soon as its holder
ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from . import procfs
from .place import LabError


class Lock:
    """An exclusive lock on a file; the file says who holds it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self, *, timeout_s: float) -> None:
        """Hold the lock.

        Errors: LabError that names the holder if it keeps the lock for `timeout_s`.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not procfs.wait_until(lambda: _try_lock(fd), timeout_s=timeout_s):
                raise LabError(
                    f"{self._path}: held by {self.holder()}, waited {timeout_s:.0f} s; one lab at a time; "
                    "wait until that process ends, or end it"
                )
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} ({procfs.command_line(os.getpid())})".encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def release(self) -> None:
        """Let go; nothing happens if it is not held."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None

    def holder(self) -> str:
        return self._path.read_text() or "a process that has just got it"


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
