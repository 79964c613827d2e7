"""The numbers that this process tells the launcher, as docs/design/events.md says: one line in an interval.

It imports neither torch nor anything that does: a program without torch may report, too.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from threading import RLock
from typing import Any, Protocol

from ..environment import MetricsPlace, claim_metrics, read_metrics

MAX_LINE_BYTES = 4096  # a pipe takes so many whole or not at all
_FLAGS = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_POLL_S = 0.02
_END_S = 0.2  # time for a GPU's last numbers, when the program ends


class Teller(Protocol):
    """An engine that tells numbers. Times are those of time.monotonic()."""

    made_at: float
    ended_at: float  # time of its last step


class Pipe:
    """One process's end of the pipe. Whatever becomes of the other end, this one neither waits nor fails."""

    def __init__(self, place: MetricsPlace) -> None:
        self._place = place
        self._pid = os.getpid()
        self._lock = RLock()
        self._is_busy = False  # the thread that has the lock is in the middle of something
        self._late: deque[tuple[Mapping[str, Any], bool]] = deque()  # not in `_told` yet
        self._fd: int | None = None
        self._opened: tuple[int, int] | None = None  # the file that it was opened for
        # time of the next line at the earliest, and of the last state
        self.due_at = self._state_at = float("-inf")
        self._told: dict[str, Any] = {}  # numbers since the last line, and tensors of a GPU
        self.line: dict[str, Any] | None = None  # the next one, which waits for numbers of a GPU
        self._state: str | None = None
        self._files: dict[str, str] = {}  # name -> content of the files that are to be written
        self._of_program: set[str] = set()
        self.has_engine = False  # True if the steps are an engine's
        self.ask: Callable[[], Mapping[str, Any]] = dict  # returns further numbers, once for each line
        self.teller: weakref.ref[Teller] | None = None
        atexit.register(self.end)

    # ---- what there is to tell

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that it was made in, and not one that was forked from it."""
        return os.getpid() == self._pid

    def claim(self, engine: weakref.ref[Teller]) -> bool:
        """Return whether this engine is now the `teller`, whose numbers are told: of several in a process the
        first that makes a step, as long as it lives. One that was made after that one's last step takes its
        place.
        """
        before, this = None if self.teller is None else self.teller(), engine()
        if this is not None and (before is None or this.made_at > before.ended_at):
            self.teller = engine
        return self.teller is engine

    def release(self, engine: weakref.ref[Teller]) -> None:
        """Forget that engine, which has ended."""
        if self.teller is engine:
            self.teller = None

    def add(self, numbers: Mapping[str, Any], *, is_program: bool = False) -> None:
        """Note numbers for the next line, and write it if it is time.

        "steps" and names in _s are added up, of others the last one counts. What the program tells goes
        before what an engine does under that name, but for the number of the step. A number may be a tensor
        of a GPU, [], that nothing changes any more.
        """
        self._late.append((numbers, is_program))
        self.look()

    def look_if_due(self) -> None:
        """Look, as `look` does, but in calls that each step makes."""
        if time.monotonic() >= self.due_at:
            self.look()

    def look(self) -> None:
        """Write the known numbers, if it is time."""
        with self._alone() as may:
            if may:
                self._write_if_due()

    def tell_state(self, state: str | None, *, at_once: bool = False) -> None:
        """From now on it does this; None: it trains. `at_once`: nothing can be written before that has
        ended.
        """
        self._state = state
        if not at_once:
            return
        with self._alone() as may:
            now = time.monotonic()
            if may and now >= self._state_at:
                self._state_at = now + self._place.interval_s
                self._send({"state": state})

    def tell_file(self, name: str, text: str) -> None:
        """Tell something longer: a JSON text of at most 1 MiB."""
        self._files[name] = text
        self.look()

    def end(self) -> None:
        """Write the numbers that have not been told."""
        until = time.monotonic() + _END_S
        with self._alone() as may:
            if may:
                self._take(self.ask(), is_program=False)
            while may and (self._told or self.line or self._files):
                if not self._write(time.monotonic()) or time.monotonic() > until:
                    return
                time.sleep(0.001)

    def wait_until_told(self, timeout_s: float) -> bool:
        """Wait until everything is written, as long as that takes at most: the pipe may not be there yet.
        Tell whether it is.
        """
        until = time.monotonic() + timeout_s
        while True:
            self.end()
            is_told = not (self._told or self.line or self._files)
            if is_told or time.monotonic() > until:
                return is_told
            time.sleep(_POLL_S)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Inside, no other thread does anything here. False: nor may this one. A process that was forked from
        the worker never may; and a handler of a signal that has come in the middle of this leaves the rest to
        what it interrupts.
        """
        if not self.is_ours:
            self._late.clear()
            yield False
            return
        with self._lock:
            if self._is_busy:
                yield False
                return
            self._is_busy = True
            try:
                while self._late:
                    numbers, is_program = self._late.popleft()
                    self._take(numbers, is_program=is_program)
                yield True
            finally:
                self._is_busy = False

    def _take(self, numbers: Mapping[str, Any], *, is_program: bool) -> None:
        step = {"step"} if self.has_engine else set()  # the engine's step
        if is_program:
            self._of_program.update(numbers)
        others = step if is_program else self._of_program - step
        if not self._told and others.isdisjoint(numbers):
            self._told.update(numbers)
            return
        for name, value in numbers.items():
            if name not in others:
                self._told[name] = value + self._told.get(name, 0) if is_sum(name) else value

    # ---- lines

    def _write_if_due(self) -> None:
        now = time.monotonic()
        if now >= self.due_at:
            self._write(now)

    def _write(self, now: float) -> bool:
        """Return whether there is more to come, which is not here yet."""
        if self.line is None:
            self._take(self.ask(), is_program=False)
            self.line, self._told = self._told, {}
            _copy_from_gpu(self.line)
        line = self.line
        if not _take_from_gpu(line):
            return True
        file = self._write_file()
        more = {"state": self._state, "file": file}
        whole = line | {name: text for name, text in more.items() if text is not None}
        self.line = None
        if not whole:
            return False
        # Do not try a line that cannot be written again at each step.
        self.due_at = now + self._place.interval_s
        if self._send(whole):
            if file is not None:
                del self._files[file]
            return bool(self._told or self._files)
        newer, self._told = self._told, line
        for name, value in newer.items():
            self._told[name] = value + line.get(name, 0) if is_sum(name) else value
        return False

    def _write_file(self) -> str | None:
        """Write the next file, whole or not at all; return its name."""
        for name, text in tuple(self._files.items()):
            path = os.path.join(os.path.dirname(self._place.path), f"{name}-{self._place.rank}.json")
            partial = f"{path}.{self._pid}"
            with contextlib.suppress(OSError):
                with open(partial, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(partial, path)
                return name
        return None

    def _send(self, told: dict[str, Any]) -> bool:
        line = f"{self._place.rank} {_ENCODER.encode(told)}\n".encode()
        if len(line) > MAX_LINE_BYTES:
            raise AssertionError(f"a line of {len(line)} bytes, and a pipe takes {MAX_LINE_BYTES}: {line!r}")
        try:
            fd = self._open()
            with _without_signal():
                return os.write(fd, line) == len(line)
        except BlockingIOError:
            return False  # the pipe is full
        except OSError:  # the pipe is not there yet, is gone, or has no reader
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            return False

    def _open(self) -> int:
        """Return the pipe's descriptor. A program may have closed all that it found open, as daemons do; then
        the number is free, or that of a file of its own, which is let alone.

        Errors: OSError
        """
        if self._fd is not None and file_of(self._fd) != self._opened:
            self._fd = None
        if self._fd is None:
            self._fd = os.open(self._place.path, _FLAGS)
            self._opened = file_of(self._fd)
        return self._fd


def file_of(fd: int) -> tuple[int, int] | None:
    """Return device and inode of the open file; None if there is none."""
    try:
        stat = os.fstat(fd)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def is_sum(name: str) -> bool:
    """Whether numbers of this name are added up, and not replaced by later ones."""
    return name == "steps" or name.endswith("_s")


def _copy_from_gpu(line: dict[str, Any]) -> None:
    """Begin to copy the numbers that GPUs have."""
    for name, value in line.items():
        if getattr(value, "is_cuda", False):
            from ..comm.numbers import ReadBack  # imported at need: it imports torch

            line[name] = ReadBack(value)


def _take_from_gpu(line: dict[str, Any]) -> bool:
    """Return whether all numbers are here."""
    for name, value in line.items():
        if hasattr(value, "is_here"):
            if not value.is_here:
                return False
            line[name] = float(value.wait())
    return True


@cache
def process_pipe() -> Pipe | None:
    """Return the pipe of this process; None where the launcher asks for no numbers, and in a process that the
    worker has started, whose steps are not the worker's.

    Errors: ConfigError for a value in the environment that is not allowed
    """
    place = read_metrics()
    if place is None or _loads_data() or not claim_metrics(place.path):
        return None
    return Pipe(place)


def _loads_data() -> bool:
    """Whether this is a process of a DataLoader. It begins before the worker has told anything, so nothing
    that it inherits says that another one tells.
    """
    data = sys.modules.get("torch.utils.data")  # a process of a DataLoader has the module
    return data is not None and data.get_worker_info() is not None


@contextlib.contextmanager
def _without_signal() -> Iterator[None]:
    """Inside, a write to a pipe without a reader raises BrokenPipeError and sends no SIGPIPE."""
    if signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
    try:
        yield
    finally:
        if signal.SIGPIPE not in before:
            signal.sigtimedwait([signal.SIGPIPE], 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
