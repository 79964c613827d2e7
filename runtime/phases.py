"""What a rank does from one optimizer step to the next: how long it computes, waits for others, and waits for
data.

A rank is in one phase at any time. Whatever changes the phase leaves a mark: its name, and when it was. On a
CPU that is the clock's time. A GPU works behind the program, so there the mark is an event in the stream that
computes, and times are read when the events have happened: nothing is waited for.

[Note: gaps]
Between two calls of the engine it is the next call that says what the program did meanwhile. Before a forward
it got its data; between a forward and the backward it computed the loss; between a forward and a step
without engine.backward() it ran the backward by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch

FORWARD, BACKWARD, OPTIMIZER, COMM, DATA = "forward", "backward", "optimizer", "comm", "data"
PAUSED = "paused"  # it saves or loads
EVALUATING = "evaluating"  # a forward that is part of no step
_STEP_ENDS = "step ends"
# Gaps, by the call that has ended; see [Note: gaps].
_AFTER = {
    FORWARD: "after forward",
    BACKWARD: "after backward",
    OPTIMIZER: "after optimizer",
    EVALUATING: "after evaluating",
}
_GAPS = frozenset([*_AFTER.values(), _STEP_ENDS])
_RUNS_BACKWARD = (BACKWARD, _AFTER[FORWARD])  # on a GPU that is a thread of autograd's
_MEANT = {  # what a gap was, by the call that follows
    FORWARD: DATA,
    BACKWARD: FORWARD,
    OPTIMIZER: BACKWARD,
    EVALUATING: PAUSED,
    DATA: DATA,
    _STEP_ENDS: OPTIMIZER,
}
_WHOLE = (PAUSED, EVALUATING)  # to wait for others is part of it
_MOST_MARKS = 4096  # of a step; then times are read within it


class Phases:
    """The times of one engine.

    Units: seconds
    """

    def __init__(self, device: torch.device) -> None:
        self._stamps: _Clock | _Events = _Events(device) if device.type == "cuda" else _Clock()
        self._marks: list[tuple[str, Any]] = []  # (what begins, when), the oldest first
        self._phase = _AFTER[OPTIMIZER]
        self._thread = get_ident()  # that calls the engine
        self._open = _Sums()

    # ---- marks

    def begin(self, phase: str) -> str | None:
        """A phase begins inside of another one; return that, for `end`, or None if this says nothing of
        what the program does: another thread, or another stream, waits.
        """
        before = self._phase
        if get_ident() != self._thread and before not in _RUNS_BACKWARD:
            return None
        if not self._stamps.is_seen() or (phase == COMM and before in _WHOLE):
            return None
        if before != phase:
            self._phase = phase
            self._mark(phase)
        return before

    def end(self, phase: str, before: str | None) -> None:
        """What `begin` has begun has ended."""
        if before is None or before == phase:
            return
        self._phase = _AFTER.get(phase, before) if before in _GAPS else before
        self._mark(self._phase)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The call of the engine inside is this phase."""
        self._thread = get_ident()
        self._stamps.note_stream()
        before = self.begin(phase)
        try:
            yield
        finally:
            self.end(phase, before)

    def end_step(self) -> None:
        """An optimizer step has ended."""
        self._phase = _AFTER[OPTIMIZER]
        self._mark(_STEP_ENDS)

    def _mark(self, phase: str) -> None:
        self._marks.append((phase, self._stamps.now()))
        if len(self._marks) > _MOST_MARKS:
            self._read(self._stamps.num_known(self._marks))

    # ---- times

    def take(self) -> dict[str, float]:
        """Return what has passed in the steps that have ended since the last call, as far as it is known:
        "steps", "step_s", and the parts of that by phase; empty where no step is.
        """
        ended = [index for index, (phase, _) in enumerate(self._marks) if phase == _STEP_ENDS]
        while ended and not self._stamps.is_known(self._marks[ended[-1]][1]):
            ended.pop()
        if ended:
            self._read(ended[-1] + 1)
        return self._open.take()

    def _read(self, count: int) -> None:
        """Add up what is between the first `count` marks; the last of them is the first from then on."""
        if count < 1:
            return
        between = self._stamps.between
        for (phase, since), (following, until) in zip(self._marks, self._marks[1:count], strict=False):
            self._open.add(phase, between(since, until), following)
        self._stamps.give_back([stamp for _, stamp in self._marks[: count - 1]])
        del self._marks[: count - 1]


class _Sums:
    """Times by phase: of steps that have ended, and of the one that has not."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}
        self._step: dict[str, float] = {}
        self._gap: tuple[str, float] = ("", 0.0)  # whose meaning is not known yet, and how long it was so far

    def add(self, phase: str, seconds: float, following: str) -> None:
        if phase in _GAPS:
            self._gap = (phase, self._gap[1] + seconds)
        else:
            self._count(phase, seconds)
        if following in _MEANT:
            kind, seconds = self._gap
            if seconds:
                self._count(PAUSED if kind == _AFTER[EVALUATING] else _MEANT[following], seconds)
            self._gap = ("", 0.0)
        if following == _STEP_ENDS:
            for name, value in self._step.items():
                self._told[name] = self._told.get(name, 0.0) + value
            self._told["step_s"] = self._told.get("step_s", 0.0) + sum(self._step.values())
            self._told["steps"] = self._told.get("steps", 0) + 1
            self._step = {}

    def _count(self, phase: str, seconds: float) -> None:
        name = f"{PAUSED if phase == EVALUATING else phase}_s"
        self._step[name] = self._step.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        told, self._told = self._told, {}
        return told


class _Clock:
    """When it is, where the program computes by itself."""

    now = staticmethod(time.perf_counter)

    def is_seen(self) -> bool:
        return True

    def note_stream(self) -> None:
        """There are none."""

    def is_known(self, stamp: float) -> bool:
        return True

    def num_known(self, marks: list[tuple[str, Any]]) -> int:
        return len(marks)

    def between(self, since: float, until: float) -> float:
        return until - since

    def give_back(self, stamps: list[float]) -> None:
        """Nothing is kept."""


class _Events:
    """Where the GPU is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)  # that computes
        self._spare: list[torch.cuda.Event] = []

    def now(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def is_seen(self) -> bool:
        return torch.cuda.current_stream(self._device) == self._stream

    def note_stream(self) -> None:
        self._stream = torch.cuda.current_stream(self._device)

    def is_known(self, stamp: torch.cuda.Event) -> bool:
        return bool(stamp.query())  # type: ignore[no-untyped-call]

    def num_known(self, marks: list[tuple[str, Any]]) -> int:
        count = len(marks) // 2  # far behind the last one
        return count if self.is_known(marks[count - 1][1]) else 0

    def between(self, since: torch.cuda.Event, until: torch.cuda.Event) -> float:
        return max(0.0, float(since.elapsed_time(until)) / 1e3)  # of two streams it may be less

    def give_back(self, stamps: list[torch.cuda.Event]) -> None:
        self._spare += stamps
