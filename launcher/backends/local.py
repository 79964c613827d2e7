"""The agent of this machine: a child process and its pipes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading

import psutil

from ..errors import EXIT_HOST, LaunchError
from ..job.plan import NodePlan
from .bootstrap import READ_LOADER, agent_python, inside

LOCAL_STOP_MARGIN_S = 10.0  # time for the agent to end, after the workers' grace
READ_BYTES = 1 << 18
ERROR_TEXT_BYTES = 4096
STATUS_WITHIN_S = 2.0  # after the end of the stream
KILLED_WITHIN_S = 10.0


def local_channel(node: NodePlan, *, kill_grace_s: float) -> LocalChannel:
    """Start the agent of a node that is this machine."""
    return LocalChannel(
        end_within_s=kill_grace_s + LOCAL_STOP_MARGIN_S,
        takes_stdin=node.stdin_rank is not None,
        prefixed=inside(agent_python(node.host), node.host.exec_prefix) if node.host.exec_prefix else (),
    )


class LocalChannel:
    """A bootstrap started on this machine, in a session of its own: a terminal's Ctrl-C reaches
    the launcher only.
    """

    local_address = ""

    def __init__(
        self, *, end_within_s: float, takes_stdin: bool = False, prefixed: tuple[str, ...] = ()
    ) -> None:
        """`takes_stdin`: a worker may read this process's input; the agent's first argument is the number of
        that descriptor. `prefixed`: the whole command of a bootstrap after a prefix.
        """
        self._end_within_s = end_within_s
        self._is_prefixed = bool(prefixed)
        self._is_spoken_to = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the channel
        self._errors_lock = threading.Lock()
        stdin = [os.dup(0)] if takes_stdin and _has_input() else []
        self._process = self._start(stdin, prefixed)
        for fd in stdin:
            os.close(fd)
        if self._process.stdin is None or self._process.stdout is None:
            raise AssertionError("Popen gave no pipes")
        self._in, self._out = self._process.stdin, self._process.stdout

    def _start(self, stdin: list[int], prefixed: tuple[str, ...]) -> subprocess.Popen[bytes]:
        """Start the bootstrap. Errors: LaunchError if a limit of this machine does not allow it"""
        words = prefixed or (sys.executable, "-I", "-S", "-u", "-c", READ_LOADER, *map(str, stdin))
        try:
            return subprocess.Popen(
                words,
                pass_fds=stdin,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                env=_environment_we_got(),
                start_new_session=True,
            )
        except OSError as error:
            from ..node.system.limits import why_not_started

            why = why_not_started("the agent", error)
            if prefixed and not why:
                what = f"cannot run {prefixed[0]}, the first word of exec_prefix: {error.strerror}"
                why = f"{what}; install it, or correct the prefix"
            raise LaunchError(why or f"cannot start the agent: {error}", exit_code=EXIT_HOST) from None

    def read(self) -> bytes:
        if self._out.closed:
            return b""
        data = os.read(self._out.fileno(), READ_BYTES)
        if not data:
            # The reading thread closes the pipe itself: if another thread closed it during a read, its
            # number could be given to a new file, and this thread would read that.
            self._out.close()
        return data

    def write(self, data: bytes) -> None:
        self._is_spoken_to = True
        view = memoryview(data)
        while view:
            view = view[self._in.write(view) or 0 :]

    def error_text(self) -> str:
        with self._errors_lock:
            # The thread that closes the channel closes this file, too, once nothing needs the error text.
            if self._errors.closed:
                return ""
            self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, self._errors.tell() - ERROR_TEXT_BYTES))
            return self._errors.read().decode("utf-8", "replace")

    def exit_status(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(STATUS_WITHIN_S)
            return status if status >= 0 else 128 - status
        return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._in.close()
        end_within_s = self._end_within_s
        # The prefix still makes its container, and does not read stdin yet
        if self._is_prefixed and not self._is_spoken_to:
            end_within_s = KILLED_WITHIN_S
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(end_within_s)
        except subprocess.TimeoutExpired:
            self._kill_tree()
        with self._errors_lock:
            self._errors.close()

    def _kill_tree(self) -> None:
        """Kill the agent, which does not end by itself, with every process below it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            keeper = psutil.Process(self._process.pid)
            for process in (keeper, *keeper.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        # the kernel keeps a killed process as long as a file system that it uses hangs
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_WITHIN_S)


def _has_input() -> bool:
    """Tell whether there is input for us: not from a terminal that another job of the shell has now."""
    if sys.stdin is None:
        return False
    try:
        return not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # a terminal, but not that of our session: no shell gives it to one job at a time
        return True


def _environment_we_got() -> dict[bytes, bytes]:
    """Return os.environ without the LC_CTYPE that Python sets for itself in the C locale: the workers inherit
    it.
    """
    env = dict(os.environb)
    with open("/proc/self/environ", "rb") as file:
        if b"\0LC_CTYPE=" not in b"\0" + file.read():
            env.pop(b"LC_CTYPE", None)
    return env
