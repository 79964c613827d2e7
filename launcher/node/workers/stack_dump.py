"""The Python stacks of a running worker.

Python writes them at a signal: see worker_hook.py, [Note: The hook]. The signal would kill a program that
does not expect it, so it is sent only to a process that catches it, says /proc/PID/status. Where no process
does, py-spy is asked, if the worker's PATH has it.
"""

from __future__ import annotations

import os
import time

from ..system.kernel_file import read_text
from ..system.lean_stdlib import suppress
from ..system.plain_file import open_plain, read_plain
from ..system.process_tree import descendants
from .preparation import find_program
from .worker_hook import SIGNAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

ANSWER_TIMEOUT_S = 3.0
PY_SPY_TIMEOUT_S = 15.0
MAX_TEXT_BYTES = 1 << 17
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "traced"}


class StackDump:
    """The stacks of one worker, on their way. Call `look` from time to time."""

    def __init__(self, pid: int, *, file: str | None, env: dict[bytes, bytes], own_file: str | None) -> None:
        """`file` is the hook's output, None without a hook; `own_file` is a place for py-spy's output."""
        self._pid = pid
        self._file = file
        self._began_at = time.monotonic()
        self._seen = 0  # bytes of the answer so far
        self._spy: subprocess.Popen[bytes] | None = None
        self._state = state_of(pid)
        self.answer: tuple[str, str, str] | None = None  # state, stacks, and why there are no stacks
        if self._state in ("stopped", "traced"):
            self._finish(
                b"", f"it is {self._state} and answers nothing; `kill -CONT {pid}` there lets it run on"
            )
            return
        self._asked = next((one for one in (pid, *descendants(pid)) if file and catches(one, SIGNAL)), None)
        self._start = 0
        with suppress(OSError):  # the worker may have removed it
            self._start = os.path.getsize(file) if file and self._asked else 0
        if self._asked is not None:
            with suppress(ProcessLookupError):
                os.kill(self._asked, SIGNAL)
            return
        program = find_program(b"py-spy", env)
        if program is None or own_file is None:
            hint = (
                "it runs no Python that can be asked"
                if file
                else "no temporary folder can be made for it, and there is no py-spy here"
            )
            self._finish(b"", f"{hint}; the kernel says it is {self._state}{waits_in(pid)}")
            return
        import subprocess

        self._file = own_file
        with open(open_plain(own_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as output:
            self._spy = subprocess.Popen(
                [program, b"dump", b"--subprocesses", b"--pid", b"%d" % pid],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def look(self, now: float) -> None:
        """Set `answer` once all is there, or took too long."""
        if self.answer is not None:
            return
        waited_s = now - self._began_at
        if self._spy is not None:
            if self._spy.poll() is None and waited_s > PY_SPY_TIMEOUT_S:
                self._spy.kill()
                self._finish(b"", f"py-spy did not end within {PY_SPY_TIMEOUT_S:g} s")
            elif self._spy.poll() is not None:
                self._finish(self._text(), "py-spy said nothing")
            return
        text = self._text()
        if text and len(text) == self._seen and text.endswith(b"\n"):
            self._finish(text, "")
        elif waited_s > ANSWER_TIMEOUT_S:
            why = f"no answer within {ANSWER_TIMEOUT_S:g} s; the kernel says it is {state_of(self._pid)}"
            self._finish(text, why + waits_in(self._pid))
        self._seen = len(text)

    def _text(self) -> bytes:
        try:
            start = self._start if self._spy is None else 0
            return read_plain(self._file or "", max_bytes=MAX_TEXT_BYTES, start=start)
        except OSError:
            return b""

    def _finish(self, text: bytes, why_not: str) -> None:
        self.answer = (self._state, text.decode("utf-8", "surrogateescape"), "" if text else why_not)


def state_of(pid: int) -> str:
    """State of the process in the kernel, in a word."""
    return _STATES.get(read_text(f"/proc/{pid}/stat").rpartition(") ")[2][:1], "ended")


def waits_in(pid: int) -> str:
    """Name the kernel function in which it sleeps, as a clause; empty if it runs or that may not be read."""
    name = read_text(f"/proc/{pid}/wchan").strip()
    return f" in {name}" if name not in ("", "0") else ""


def catches(pid: int, signum: int) -> bool:
    """Tell whether the process has a handler for the signal."""
    for line in read_text(f"/proc/{pid}/status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False
