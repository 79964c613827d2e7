"""One line instead of a traceback where a rank only reports that it lost another one.

When a rank fails, its peers end in their present collective: one failure would read like many. The traceback
of an error that gloo, NCCL or torch's store makes of a lost connection is held back until the job has a
failure; then it is one line. Any other traceback is shown at once. A held one is shown, too, if no failure
follows, because the program has caught the error. A line of the runtime that several ranks write is shown
once. Log files hold everything.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..job.verdict import lost_peer_words
from ..node.observe.evidence import NUM_KEPT_LINES, TRACEBACK, is_link, unmarked
from ..wire.frames import bytes_of, text_of

HELD_S = 3.0  # an error is held back so long, and shown if nothing ended by then
_OURS = b"dslaunch: "  # begins an error of the runtime
_BEGINS = (TRACEBACK.encode(), _OURS)  # the first line of a failure contains one of these
_MAX_SAID = 1000
_PREFACE = re.compile(r"dslaunch: rank [0-9]+: (.* failed after [0-9.]+ s):")  # from comm/flight_recorder.py
_OF_COLLECTIVES = re.compile(
    r"gloo|nccl|c10d|ProcessGroup|TCPStore|torch[./]distributed|runtime/comm/", re.IGNORECASE
)
Show = Callable[[int, bytes], None]


class Trace(NamedTuple):
    """The lines of one failure as a rank writes them, and whether its exception is among them."""

    lines: tuple[str, ...]
    is_complete: bool = False

    def takes(self, line: str) -> Trace | None:
        """Return this trace with one more line; None if the line does not belong to it."""
        text = unmarked(line)
        is_indented = text.startswith((" ", "\t"))
        if len(self.lines) >= NUM_KEPT_LINES or not text.strip():
            return None
        if self.is_complete:
            return Trace((*self.lines, line), True) if is_indented else None
        if len(self.lines) == 1 and _PREFACE.fullmatch(self.lines[0]):
            return Trace((*self.lines, line)) if text.rstrip() == TRACEBACK else None
        if is_indented:
            return Trace((*self.lines, line))
        has_frames = unmarked(self.lines[-1]).startswith((" ", "\t"))
        return Trace((*self.lines, line), True) if has_frames else None

    @property
    def is_lost_peer(self) -> bool:
        """Tell whether the failure says only that the other side of a collective is gone."""
        frames = [one for one in self.lines if unmarked(one).lstrip().startswith('File "')]
        error = self._error
        return bool(lost_peer_words(error)) and bool(_OF_COLLECTIVES.search(error + (frames or [""])[-1]))

    @property
    def _error(self) -> str:
        found = [one for one in self.lines if not unmarked(one).startswith((" ", "\t"))]
        return unmarked(found[-1])

    def folded(self) -> str:
        """Return the line that is shown in place of the traceback."""
        preface = _PREFACE.fullmatch(self.lines[0])
        what = preface[1] if preface else self._error.partition(":")[0]
        words = lost_peer_words(self._error)
        return f"lost another rank: {what}: {words} (--fold_failures no shows the traceback)"


def _without_messages(traceback: Sequence[str]) -> list[str]:
    """Yield the frames and first lines of the errors; a message of several lines is shown line by line."""
    found: list[str] = []
    is_message = False
    for line in traceback:
        text = unmarked(line)
        is_indented = text.startswith((" ", "\t"))
        if not text.strip() or is_link(line) or (is_message and is_indented):
            continue
        is_message = not is_indented and text.rstrip() != TRACEBACK
        found.append(line)
    return found


class _Rank(NamedTuple):
    """The part of a rank's stderr that is not shown yet: a failure, and the lines behind it."""

    trace: Trace
    behind: tuple[bytes, ...] = ()
    held_at: float = 0.0


class FailureFolding:
    """Takes whole lines of ranks' stderr and hands them to `show`; may be called from any thread."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._lock = threading.Lock()
        self._held: dict[int, _Rank] = {}
        self._has_failed = False
        self._shown: dict[int, deque[str]] = {}  # lines of each rank's tracebacks
        self._said: dict[bytes, int] = {}  # lines of the runtime's, and the rank that wrote each first

    def begin(self) -> None:
        """Begin an attempt."""
        with self._lock:
            self._release(is_all=True)
            self._has_failed = False
            self._shown.clear()
            self._said.clear()

    def put(self, rank: int, body: bytes) -> bool:
        """Take lines, and tell whether that was done; if not, the caller must show them, and no line of the
        rank is held.
        """
        with self._lock:
            if rank not in self._held and not any(one in body for one in _BEGINS):
                return False
            for line in body[:-1].split(b"\n"):
                self._put_line(rank, line + b"\n")
            return True

    def has_shown(self, rank: int, traceback: Sequence[str]) -> bool:
        """Tell whether all of this traceback of the rank was shown here."""
        lines = set(_without_messages(traceback))
        return bool(lines) and lines <= set(self._shown.get(rank, ()))

    def has_said(self, line: str) -> bool:
        """Tell whether this line of the runtime's was shown here, from any rank."""
        return bytes_of(f"{line}\n") in self._said

    def failed(self) -> None:
        """Note that a rank or host has failed: the held failures follow from it, and so do later ones."""
        with self._lock:
            self._has_failed = True
            self._release(is_all=False)

    def look(self, *, is_end: bool = False) -> None:
        """Show the held failures that have waited long enough; at the end all."""
        with self._lock:
            self._release(is_all=is_end)

    def _put_line(self, rank: int, line: bytes) -> None:
        text = text_of(line[:-1])
        held = self._held.get(rank)
        if held is not None and held.behind:
            self._held[rank] = held._replace(behind=(*held.behind, line))
            if len(held.behind) >= NUM_KEPT_LINES:
                self._show_held(rank)
            return
        if held is not None:
            more = held.trace.takes(text)
            if more is not None:
                self._held[rank] = held._replace(trace=more)
                if more.is_complete and not held.trace.is_complete and not more.is_lost_peer:
                    self._show_held(rank)
                return
            if held.trace.is_complete and not self._has_failed:
                self._held[rank] = held._replace(behind=(line,))
                return
            self._show_held(rank)
        if unmarked(text).rstrip() == TRACEBACK or _PREFACE.fullmatch(text):
            self._held[rank] = _Rank(Trace((text,)), held_at=time.monotonic())
        elif not line.startswith(_OURS) or self._said.setdefault(line, rank) == rank:
            self._show(rank, line)
            if len(self._said) > _MAX_SAID:
                self._said.clear()

    def _release(self, *, is_all: bool) -> None:
        until = time.monotonic() - HELD_S
        for rank, one in [*self._held.items()]:
            if is_all or one.held_at < until or (self._has_failed and one.trace.is_complete):
                self._show_held(rank)

    def _show_held(self, rank: int) -> None:
        held = self._held.pop(rank)
        lines: Sequence[str] = held.trace.lines
        if self._has_failed and held.trace.is_complete and held.trace.is_lost_peer:
            lines = (held.trace.folded(),)
        elif held.trace.is_complete:
            self._shown.setdefault(rank, deque(maxlen=NUM_KEPT_LINES)).extend(lines)
        self._show(rank, bytes_of("".join(f"{one}\n" for one in lines)))
        for line in held.behind:
            self._put_line(rank, line)
