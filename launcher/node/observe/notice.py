"""Notices that this host must be left: a file that appears, or a command that ends with 0.

The command's exit code comes through a pipe, not from wait(): the agent collects every child that ends.
"""

from __future__ import annotations

import os
import time

from ...wire.frames import bytes_of
from ..system.lean_stdlib import signal, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping

LOOK_EVERY_S = 2.0
COMMAND_TIMEOUT_S = 10.0
_VARIABLE = b"DSLAUNCH_NOTICE_COMMAND"  # hides the command from `ps`
_RUN = '( eval "$DSLAUNCH_NOTICE_COMMAND" ) </dev/null >/dev/null 2>&1; echo $?'
_CANNOT_RUN = {126: "it cannot be run", 127: "there is no such command"}  # a shell's codes


class Command:
    """One run of the command. `code` is None until it has ended; `problem` says why it could not run."""

    def __init__(self, command: str, env: Mapping[bytes, bytes]) -> None:
        import subprocess

        self.code: int | None = None
        self.problem = ""
        self._until = time.monotonic() + COMMAND_TIMEOUT_S
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._has_ended = False
        self.fd, write = os.pipe()
        os.set_blocking(self.fd, False)
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _RUN],
                env={**env, _VARIABLE: bytes_of(command)},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self.problem = os.strerror(error.errno or 0)
        finally:
            os.close(write)

    def look(self, now: float) -> bool:
        """Tell whether it is over: `code` or `problem` is set then."""
        with suppress(BlockingIOError):
            data = os.read(self.fd, 64)
            self._said += data
            if not data:
                self._has_ended = True
                text = self._said.strip()
                self.code = int(text) if text.isdigit() else None
                self.problem = self.problem or _CANNOT_RUN.get(self.code or 0, "")
                if self.code is None:
                    self.problem = self.problem or "it was killed"
                return True
        if now > self._until:
            self.problem = f"it did not end within {COMMAND_TIMEOUT_S:g} s"
            return True
        return False

    def close(self) -> None:
        """Kill the command if it runs."""
        os.close(self.fd)
        if self._process is not None:
            if not self._has_ended:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.returncode = 0  # the agent collects it


class NoticeWatch:
    """Looks from time to time, until the host is told to go or `close`."""

    def __init__(
        self,
        *,
        file: str | None,
        command: str | None,
        env: Mapping[bytes, bytes],
        leave: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        """`leave` and `note` get sentences; each problem of the command is noted once."""
        self._file, self._command, self._env = file, command, env
        self._leave, self._note = leave, note
        self._is_over = not (file or command)
        self._look_at = 0.0
        self._running: Command | None = None
        self._noted: set[str] = set()

    def look(self, now: float) -> None:
        """Do what is due; never wait."""
        if self._is_over:
            return
        if self._running is not None and self._running.look(now):
            self._end_command(self._running)
        if self._is_over or now < self._look_at or self._running is not None:
            return
        self._look_at = now + LOOK_EVERY_S
        if self._file is not None and is_there(self._file):
            self._tell(told_by_file(self._file))
        elif self._command is not None:
            self._running = Command(self._command, self._env)

    def _end_command(self, command: Command) -> None:
        self._running = None
        command.close()
        if command.code == 0:
            self._tell(TOLD_BY_COMMAND)
        elif command.problem and command.problem not in self._noted:
            self._noted.add(command.problem)
            self._note(f"--notice_command: {command.problem}; nothing is known of a notice by it")

    def _tell(self, why: str) -> None:
        self.close()
        self._leave(why)

    def close(self) -> None:
        """Look no more."""
        self._is_over = True
        if self._running is not None:
            self._running.close()
            self._running = None


TOLD_BY_COMMAND = "--notice_command ended with 0"


def told_by_file(path: str) -> str:
    return f"there is {path}"


def is_there(path: str) -> bool:
    return os.path.lexists(os.path.expanduser(bytes_of(path)))


def notice_of(file: str | None, command: str | None) -> str:
    """Return the reason for which this host must be left now; empty without one. Wait for the command."""
    if file is not None and is_there(file):
        return told_by_file(file)
    if command is None:
        return ""
    running = Command(command, dict(os.environb))
    try:
        while not running.look(time.monotonic()):
            time.sleep(0.02)
        return TOLD_BY_COMMAND if running.code == 0 else ""
    finally:
        running.close()
