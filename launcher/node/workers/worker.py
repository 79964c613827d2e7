"""One worker process and its two output pipes."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time

from ...wire.frames import text_of
from ..observe.evidence import NUM_KEPT_LINES, NUM_LAST_LINES, TRACEBACK, Tail
from ..system.lean_stdlib import signal, suppress
from ..system.line_buffer import LineBuffer
from ..system.process_tree import die_with_parent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

READ_BYTES = 1 << 16
MAX_WORD_BYTES = 32 * 4096  # limit of one argument or variable; MAX_ARG_STRLEN of Linux
_TRACEBACK = TRACEBACK.encode()
PROMPT_AFTER_S = 0.2
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)  # the agent handles them all


class WorkerStream:
    """The reading end of a worker's stdout (number 1) or stderr (number 2)."""

    def __init__(self, fd: int, number: int, *, is_verbatim: bool = False) -> None:
        self.fd = fd
        self.number = number
        self.is_open = True
        self.tail = Tail(NUM_KEPT_LINES if number == 2 else NUM_LAST_LINES)
        self._lines = LineBuffer(is_verbatim=is_verbatim)
        self._read_at = 0.0
        self.traceback_at = 0.0  # when the last traceback of Python began to come
        self._last_bytes: int | None = None  # bytes that are still to be read, once the worker has ended

    def read(self) -> tuple[bytes, bool]:
        """Return the whole lines that are there now, and whether more may be waiting. Close at the end."""
        size = READ_BYTES if self._last_bytes is None else min(READ_BYTES, self._last_bytes)
        try:
            data = os.read(self.fd, size)
        except BlockingIOError:
            return b"", False
        if not data:
            return self._noted(self._close()), False
        if self._last_bytes is not None:
            self._last_bytes -= len(data)
        self._read_at = time.monotonic()
        return self._noted(self._lines.add(data, now=self._read_at)), True

    def prompt(self, now: float) -> bytes:
        """Return a begun line that was left for a while, as a whole line: a question."""
        is_left = self.is_open and now - self._read_at > PROMPT_AFTER_S
        return self._noted(self._lines.begun()) if is_left else b""

    def _noted(self, lines: bytes) -> bytes:
        self.tail.add(lines)
        if self.number == 2 and _TRACEBACK in lines:
            self.traceback_at = self._read_at
        return lines

    def limit(self) -> None:
        """Limit the reading to what is in the pipe now: the worker has ended.

        Output that other processes add, which still hold the pipe open, is not read.
        """
        if self.is_open:
            from termios import FIONREAD  # the agent has time for it now

            self._last_bytes = int.from_bytes(fcntl.ioctl(self.fd, FIONREAD, bytes(4)), sys.byteorder)

    def _close(self) -> bytes:
        """Stop reading; return the unfinished last line."""
        self.is_open = False
        os.close(self.fd)
        return self._lines.rest()


class Worker:
    """A started rank. `status` is None while it runs, then its wait status; `ended_at` is on the monotonic
    clock.
    """

    def __init__(self, *, rank: int, pid: int, streams: tuple[WorkerStream, WorkerStream]) -> None:
        self.rank = rank
        self.pid = pid
        self.streams = streams
        self.status: int | None = None
        self.ended_at = 0.0
        self.is_told = False
        self.is_prompting = False  # it reads a terminal, so it may wait for an answer to an open line
        self.has_local_rank = False  # dslaunch gives it as the first argument
        self.error_file: str | None = None  # torch's @record writes there
        self.place_file: str | None = None  # the runtime writes its place along the job's axes there
        self.stacks_file: str | None = None  # its Python writes its stacks there when asked
        self.is_out_of_memory = False
        self.facts: list[str] = []  # the kernel's facts about its failure

    def end(self, status: int) -> None:
        """Take note of its wait status: it was collected."""
        self.status = status
        self.ended_at = time.monotonic()
        for stream in self.streams:
            stream.limit()

    def signal(self, signum: int, *, is_for_group: bool = True) -> None:
        """Signal the worker's process group, as a terminal would, or the worker alone."""
        if self.status is not None:
            return
        try:
            (os.killpg if is_for_group else os.kill)(self.pid, signum)
        except ProcessLookupError:  # it was forked just now and has no group yet
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)


def spawn(
    *,
    rank: int,
    argv: list[bytes],
    env: dict[bytes, bytes],
    cores: Iterable[int] | None = None,
    is_verbatim: bool = False,
    stdin: int | None = None,
    open_files: tuple[int, int] | None = None,
) -> Worker:
    """Start one rank in a session of its own, in the present folder, on these CPUs.

    It dies when this process dies.

    `stdin` is a descriptor to read from; None means that there is nothing to read. `open_files` are limits
    for it, where this process has others. Errors: OSError if a limit of this host allows no more processes or
    files. A program that cannot be executed becomes a worker that wrote the reason to stderr and exited with
    127.
    """
    parent = os.getpid()

    def fork(out: int, err: int) -> int:
        # The child begins with our signal handlers. Until it resets them, they would treat a signal sent to
        # the child as one sent to this process.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                _become(
                    argv,
                    env,
                    parent=parent,
                    fds=(stdin, out, err),
                    mask=mask,
                    cores=cores,
                    open_files=open_files,
                )
            return pid
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return start_worker(rank, fork, is_verbatim=is_verbatim)


def start_worker(rank: int, start: Callable[[int, int], int], *, is_verbatim: bool = False) -> Worker:
    """Make a worker of `start(out, err)`, which returns its pid; both are the writing ends of pipes.

    Errors: those of `start`; no pipe is left then
    """
    out_read, out_write = os.pipe()
    try:
        err_read, err_write = os.pipe()
    except OSError:
        os.close(out_read)
        os.close(out_write)
        raise
    try:
        pid = start(out_write, err_write)
    except BaseException:
        os.close(out_read)
        os.close(err_read)
        raise
    finally:
        os.close(out_write)
        os.close(err_write)
    for fd in (out_read, err_read):
        os.set_blocking(fd, False)
    streams = (
        WorkerStream(out_read, 1, is_verbatim=is_verbatim),
        WorkerStream(err_read, 2, is_verbatim=is_verbatim),
    )
    return Worker(rank=rank, pid=pid, streams=streams)


def _why_not_run(number: int | None, argv: list[bytes], env: dict[bytes, bytes]) -> str:
    """Return the text behind the kernel's error: cause or remedy. Empty if that error says all."""
    if number == errno.E2BIG:
        return f": {_largest(argv, env)}"
    if number == errno.EACCES and os.path.isdir(argv[0]):
        return ": it is a folder; give the program in it"
    is_file = b"/" in argv[0] and os.path.isfile(argv[0])
    if number == errno.EACCES and is_file:
        return ": it is not executable there; write chmod +x, or start a Python script without --no_python"
    if number == errno.ENOENT and is_file:
        return (
            ": the file is there, but not the interpreter that its first line names; are its line "
            "ends those of Windows?"
        )
    if number == errno.ENOEXEC:
        return ": it is no program, and its first line names no interpreter; begin it with e.g. #!/bin/sh"
    if number == errno.ENOENT and b"/" not in argv[0]:
        return ": no folder of PATH there has it"
    return ""


def _largest(argv: list[bytes], env: dict[bytes, bytes]) -> str:
    """Name the text that was too long for the kernel, which limits each one and their sum."""
    name, value = max(env.items(), key=lambda one: len(one[1]), default=(b"", b""))
    if len(name) + len(value) + 2 > MAX_WORD_BYTES:
        return (
            f"the variable {text_of(name)} has {len(value)} bytes, and the kernel takes "
            f"{MAX_WORD_BYTES} for one"
        )
    longest = max(map(len, argv))
    if longest + 1 > MAX_WORD_BYTES:
        return (
            f"an argument has {longest} bytes, and the kernel takes {MAX_WORD_BYTES} for "
            "one; pass it in a file"
        )
    total = sum(map(len, argv)) + sum(len(name) + len(value) for name, value in env.items())
    return f"all arguments and variables together have {total} bytes; see ulimit -s there"


def _become(
    argv: list[bytes],
    env: dict[bytes, bytes],
    *,
    parent: int,
    fds: tuple[int | None, int, int],
    mask: Iterable[int],
    cores: Iterable[int] | None,
    open_files: tuple[int, int] | None,
) -> None:
    """Turn into the program; called in the child. Never returns."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        # Our own handlers would not survive exec, but signals that Python ignores (PIPE and XFSZ) stay so.
        for signum in (*HANDLED, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        die_with_parent(parent, signal.SIGKILL)
        stdin, out, err = fds
        os.dup2(os.open(os.devnull, os.O_RDONLY) if stdin is None else stdin, 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        if cores is not None:
            os.sched_setaffinity(0, cores)
        if open_files is not None:
            from ..system.limits import (
                restore_open_files,
            )

            restore_open_files(open_files)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        reason = os.strerror(error.errno or 0) + _why_not_run(error.errno, argv, env)
        os.write(2, b"dslaunch: cannot run %s: %s\n" % (argv[0], reason.encode()))
    finally:
        os._exit(127)
