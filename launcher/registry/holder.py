"""The process of a job, identified without doubt, and signals to it.

[Note: Liveness] A job's process holds a lock on a file in the job's folder from its first moment to its last,
and the kernel gives the lock up with the process. So the kernel says whether a job is there, and as which
process; a process id in a file is not trusted: it may be another process by now. The lock is one of POSIX,
which children do not inherit: processes that a job leaves behind do not make it look alive.

A process is signalled through a descriptor of it that was opened while it held the lock, asked before and
after: the lock cannot have passed to another process of the same number in between. A kernel before 5.3 and
some containers have no such descriptors: there the number is used, just after it was seen to hold the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import struct
import time
from pathlib import Path

FILE = "lock"
_FLOCK = "hhqqi4x"  # struct flock of a 64-bit Linux: type, whence, start, length, pid
_POLL_S = 0.02


def hold(folder: Path) -> int:
    """Lock the job's file until the process ends, or the returned descriptor is closed.

    Errors: OSError, also where the file system knows no locks
    """
    fd = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def holder_of(folder: Path) -> int | None:
    """Return the process id of the job in this folder; None if its process is not there.

    0 if it is in another PID namespace, such as that of a container, and cannot be reached from here. The
    job's own process must not call it: closing the file there would give up its lock.
    """
    try:
        fd = os.open(folder / FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    finally:
        os.close(fd)
    return None if kind == fcntl.F_UNLCK else max(0, pid)


class Process:
    """The process of a job, and no other one, even if its number is given to another one later."""

    def __init__(self, folder: Path) -> None:
        """Errors: ProcessLookupError if the job's process is not there, or cannot be reached from here"""
        pid = holder_of(folder)
        if not pid:
            raise ProcessLookupError
        self.pid, self._folder = pid, folder
        self._fd: int | None = None
        try:
            self._fd = os.pidfd_open(pid)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
        if holder_of(folder) != pid:
            self.close()
            raise ProcessLookupError

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self._fd is not None:
                signal.pidfd_send_signal(self._fd, number)
            elif holder_of(self._folder) == self.pid:
                os.kill(self.pid, number)

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Tell whether it has ended; wait for that, but not longer than this."""
        if self._fd is not None:
            return bool(select.select([self._fd], [], [], timeout_s)[0])
        deadline = time.monotonic() + timeout_s
        while holder_of(self._folder) == self.pid:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
