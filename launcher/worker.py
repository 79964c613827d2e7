"""One worker process and its two output pipes. Sent to the nodes: standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from .output import LineBuffer
from .process_tree import die_with_parent

READ_BYTES = 1 << 16


class Stream:
    """The reading end of a worker's stdout (number 1) or stderr (number 2)."""

    def __init__(self, fd: int, number: int) -> None:
        self.fd = fd
        self.number = number
        self.is_open = True
        self._lines = LineBuffer()

    def read(self) -> tuple[bytes, bool]:
        """Whole lines that are there now, and whether more may be waiting. Closes itself at the end."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return b"", False
        if data:
            return self._lines.add(data, now=time.monotonic()), True
        return self.close(), False

    def close(self) -> bytes:
        """Stop reading; returns the unfinished last line."""
        if not self.is_open:
            return b""
        self.is_open = False
        os.close(self.fd)
        return self._lines.rest()


class Worker:
    """A started rank. `status` is None while it runs, then its wait status."""

    def __init__(self, *, rank: int, pid: int, streams: tuple[Stream, Stream]) -> None:
        self.rank = rank
        self.pid = pid
        self.streams = streams
        self.status: int | None = None
        self.is_reported = False

    def signal(self, signum: int) -> None:
        """Signal the worker's process group, as a terminal would."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signum)


def spawn(*, rank: int, argv: list[bytes], env: dict[bytes, bytes]) -> Worker:
    """Start one rank in a session of its own, in the present folder. It dies when this process dies.

    A program that cannot be executed is a worker that wrote why to stderr and exited 127.
    """
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(argv, env, parent=parent, out=out_write, err=err_write)
    os.close(out_write)
    os.close(err_write)
    for fd in (out_read, err_read):
        os.set_blocking(fd, False)
    return Worker(rank=rank, pid=pid, streams=(Stream(out_read, 1), Stream(err_read, 2)))


def _become(argv: list[bytes], env: dict[bytes, bytes], *, parent: int, out: int, err: int) -> None:
    """In the child: turn into the program. Never returns."""
    try:
        os.setsid()
        die_with_parent(parent, signal.SIGKILL)
        for signum in (
            signal.SIGPIPE,
            signal.SIGXFSZ,
        ):  # Python ignores these two, and exec would pass that on
            signal.signal(signum, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        os.write(2, b"dslaunch: cannot run %s: %s\n" % (argv[0], reason.encode()))
    finally:
        os._exit(127)
