"""What a rank does from one optimizer step to the next: how long it computes, waits for others, and waits for
data.

A rank is in one phase at any time. Whatever changes the phase leaves a mark: its name, and when it was. On a
CPU that is the clock's time. A GPU works behind the program, so there the mark is an event in the stream that
computes, and times are read when the events have happened: nothing is waited for.

A mark costs some microseconds, so not all steps are timed: see timed_steps.py. One that is not leaves marks
where a micro batch ends and the next one begins, and around whatever is no part of a step. So the number of
steps, their time, what passes between micro batches, and pauses are exact, as it is those that differ from
one step to the next; what the rest of an untimed step was made of is known from timed ones: see
parts_by_length.py.

[Note: gaps]
Between two calls of the engine it is the next call that says what the program did meanwhile. Before a forward
it got its data, as before an evaluation, with which a teacher may begin a step; between a forward and the
backward it computed the loss, or ran the forward by itself; between a forward and a step without
engine.backward() it ran the backward by itself, and so before the end of another micro batch. What follows an
evaluation between two steps is part of it, up to the next call that trains; after one inside of a step, as of
a teacher, the step goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from time import perf_counter as clock_s
from typing import Any

import torch

from .parts_by_length import PartsByLength
from .timed_steps import TimedSteps

FORWARD, BACKWARD, OPTIMIZER, COMM, DATA = "forward", "backward", "optimizer", "comm", "data"
PAUSED = "paused"  # it saves or loads
EVALUATING = "evaluating"  # a forward that is part of no step
_STEP_ENDS, _MICRO_BATCH_ENDS = "step ends", "micro batch ends"
_BETWEEN = "between"  # the end of a micro batch and the begin of the next one
_UNTIMED = "untimed"  # inside of a micro batch of an untimed step
_UNTIMED_ALL = "untimed, and so is what was before"
# Gaps, by the call that has ended; see [Note: gaps].
_AFTER = {
    FORWARD: "after forward",
    BACKWARD: "after backward",
    OPTIMIZER: "after optimizer",
    EVALUATING: "after evaluating",
}
_GAPS = frozenset([*_AFTER.values(), _STEP_ENDS, _MICRO_BATCH_ENDS, _BETWEEN])
_WITHIN = (_AFTER[FORWARD], _AFTER[BACKWARD])  # gaps inside of a micro batch
_PARTS = (FORWARD, BACKWARD, OPTIMIZER, COMM, DATA)
_RUNS_BACKWARD = (BACKWARD, _AFTER[FORWARD])  # on a GPU that is a thread of autograd's
_MEANT = {  # what a gap was, by the call that follows
    FORWARD: DATA,
    BACKWARD: FORWARD,
    OPTIMIZER: BACKWARD,
    EVALUATING: DATA,
    DATA: DATA,
    _STEP_ENDS: OPTIMIZER,
    _MICRO_BATCH_ENDS: BACKWARD,
    _UNTIMED: DATA,
    _UNTIMED_ALL: _UNTIMED,
}
_IS_BETWEEN = {  # whether what follows is
    **dict.fromkeys((FORWARD, BACKWARD, OPTIMIZER, DATA, _UNTIMED, _UNTIMED_ALL), False),
    **dict.fromkeys((_STEP_ENDS, _MICRO_BATCH_ENDS), True),
}
_WHOLE = (PAUSED, EVALUATING)  # to wait for others is part of it
_NOTHING: AbstractContextManager[None] = nullcontext()
_MOST_MARKS = 4096  # then times are read before the step ends


class Phases:
    """The times of one process.

    Units: seconds
    """

    def __init__(self, device: torch.device) -> None:
        self.is_timed = True  # the step that is being made
        self.sees_waits = True  # it is timed, or this is between micro batches
        self._events = _Events(device) if device.type == "cuda" else None
        self._now: Callable[[], Any] = self._events.now if self._events else clock_s
        self._marks: list[tuple[str, Any]] = []  # (what begins, when), the oldest first
        self._ends: list[int] = []  # those of them that end steps
        self._phase = _BETWEEN
        self._thread = get_ident()  # that calls the engine
        self._sums = _Sums()
        self._timed_steps = TimedSteps()

    # ---- marks

    def begin(self, phase: str) -> str | None:
        """A phase begins inside of another one; return that, for `end`, or None if this says nothing of
        what the program does: another thread, or another stream, waits. Where `sees_waits` is false it is
        not told of waits.
        """
        before = self._phase
        if get_ident() != self._thread and before not in _RUNS_BACKWARD:
            return None
        if before in _WHOLE and phase == COMM:
            return None
        if self._events is not None and not self._events.is_seen():
            return None
        if before != phase:
            self._phase = phase
            self._marks.append((phase, self._now()))
        return before

    def end(self, phase: str, before: str | None) -> None:
        """What `begin` has begun has ended."""
        if before is None or before == phase:
            return
        if before in _GAPS and not (phase == EVALUATING and before in _WITHIN):
            before = _AFTER.get(phase, before)
        self._phase = before
        self._marks.append((before, self._now()))

    def during(self, phase: str) -> AbstractContextManager[None]:
        """Around a call of the engine, which is this phase."""
        if self.is_timed or phase in _WHOLE:
            return During(self, phase)
        if self._phase != _UNTIMED:
            self._phase, self.sees_waits = _UNTIMED, False
            self._mark_call(_UNTIMED if phase in (FORWARD, DATA) else _UNTIMED_ALL)
        return _NOTHING

    def begin_call(self, phase: str) -> str | None:
        """As `begin`, of a call of the engine: this thread, and on a GPU the stream, is where it computes."""
        self._thread = get_ident()
        self._look_around()
        return self.begin(phase)

    def end_micro_batch(self) -> None:
        """A micro batch has ended, and no step."""
        if self._phase in (*_WITHIN, _UNTIMED):
            self._phase, self.sees_waits = _BETWEEN, True
            self._mark_call(_MICRO_BATCH_ENDS)

    def end_step(self, next_step: int) -> None:
        """An optimizer step has ended; the next one has this number, the same on all ranks."""
        self.is_timed = next_step in self._timed_steps
        self._phase, self.sees_waits = _BETWEEN, True
        self._mark_call(_STEP_ENDS)
        self._ends.append(len(self._marks) - 1)

    def _mark_call(self, mark: str) -> None:
        if self._events is not None or len(self._marks) > _MOST_MARKS:
            self._look_around()
        self._marks.append((mark, self._now()))

    def _look_around(self) -> None:
        if self._events is not None:
            self._events.note_stream()
        if len(self._marks) > _MOST_MARKS:
            self._read_early()

    # ---- times

    def take(self) -> dict[str, float]:
        """Return what has passed in the steps that have ended since the last call, as far as it is known:
        "steps", "step_s", and the parts of that by phase; empty where no step is.
        """
        num_known = self._num_known(self._ends[-1] + 1) if self._ends else 0
        known = [end for end in self._ends if end < num_known]
        if known:
            self._read(known[-1] + 1)
        told = self._sums.take()
        if told:
            seconds = told.get("step_s", 0.0) - told.get("paused_s", 0.0)
            self._timed_steps.adapt(num_steps=told["steps"], seconds=seconds, marks=self._sums.marks)
        return told

    def _read_early(self) -> None:
        """There are many marks. Those of a GPU that are far behind the last one are read."""
        count = len(self._marks)
        self._read(count if self._events is None else self._num_known(count // 2))

    def _num_known(self, count: int) -> int:
        """Return how many of the first `count` marks have happened, one after the other: those of a stream
        that the last one did not wait for may be late.
        """
        if self._events is None:
            return count
        stamps = (stamp for _, stamp in self._marks[:count])
        return next((number for number, one in enumerate(stamps) if not self._events.is_known(one)), count)

    def _read(self, count: int) -> None:
        """Add up what is between the first `count` marks; the last of them is the first from then on."""
        if count < 1:
            return
        self._sums.add(self._marks[:count], _between_clocks if self._events is None else _between_events)
        if self._events is not None:
            self._events.give_back([stamp for _, stamp in self._marks[: count - 1]])
        del self._marks[: count - 1]
        self._ends = [index - count + 1 for index in self._ends if index >= count]


class During:
    """The call inside is a phase."""

    __slots__ = ("_before", "_phase", "_phases")

    def __init__(self, phases: Phases, phase: str) -> None:
        self._phases, self._phase = phases, phase
        self._before: str | None = None

    def __enter__(self) -> None:
        self._before = self._phases.begin_call(self._phase)

    def __exit__(self, *_: object) -> None:
        self._phases.end(self._phase, self._before)


class _Sums:
    """Times by phase: of steps that have ended, and of the one that has not."""

    def __init__(self) -> None:
        self.marks = 0.0  # in a timed step, the last time that there was one
        self._step: dict[str, float] = dict.fromkeys((*_PARTS, *_WHOLE, _UNTIMED), 0.0)
        self._between: dict[str, float] = dict.fromkeys((DATA, COMM), 0.0)  # micro batches; not in `_step`
        self._is_between = False
        self._gap, self._gap_s = "", 0.0  # whose meaning is not known yet, and how long it was so far
        self._num_marks = 0  # of this step
        self._steps, self._step_s, self._paused_s = 0, 0.0, 0.0  # since they were taken
        self._parts_s = dict.fromkeys(_PARTS, 0.0)  # as far as they were timed
        self._by_length = PartsByLength()

    def add(self, marks: Sequence[tuple[str, Any]], between: Callable[[Any, Any], float]) -> None:
        """Add what is between these."""
        phase, since = marks[0]
        for following, until in marks[1:]:
            self._add(phase, between(since, until), following)
            phase, since = following, until

    def _add(self, phase: str, seconds: float, following: str) -> None:
        self._num_marks += 1
        if phase in _GAPS:
            self._gap = phase
            self._gap_s += seconds
        elif phase == COMM and self._is_between:
            self._between[COMM] += seconds
        else:
            self._step[_UNTIMED if phase == _UNTIMED_ALL else phase] += seconds
        if following not in _MEANT:
            return
        if self._gap_s and not (following == EVALUATING and self._gap in _WITHIN):
            meant = PAUSED if self._gap == _AFTER[EVALUATING] else _MEANT[following]
            sums = self._between if meant == DATA and self._is_between else self._step
            sums[meant] += self._gap_s
            self._gap_s = 0.0
        self._is_between = _IS_BETWEEN.get(following, self._is_between)
        if following == _STEP_ENDS:
            self._end_step()

    def _end_step(self) -> None:
        """Of most, which are not timed, there is little to add up."""
        step, between = self._step, self._between
        untimed_s, data_s, comm_s = step[_UNTIMED], between[DATA], between[COMM]
        paused_s = step[PAUSED] + step[EVALUATING]
        own_s = untimed_s
        if untimed_s:
            self._by_length.add_untimed(untimed_s)
        else:
            parts = {phase: step[phase] for phase in _PARTS}
            own_s = sum(parts.values())
            for phase, seconds in parts.items():
                self._parts_s[phase] += seconds
                step[phase] = 0.0
            if own_s:
                self._by_length.add(parts)
            self.marks = self._num_marks
        self._parts_s[DATA] += data_s
        self._parts_s[COMM] += comm_s
        self._steps += 1
        self._step_s += own_s + data_s + comm_s + paused_s
        self._paused_s += paused_s
        self._num_marks = 0
        between[DATA] = between[COMM] = step[_UNTIMED] = step[PAUSED] = step[EVALUATING] = 0.0

    def take(self) -> dict[str, float]:
        """Return those of steps that have ended, once."""
        if not self._steps:
            return {}
        untimed_s = self._by_length.take()
        told = {"steps": self._steps, "step_s": self._step_s, "paused_s": self._paused_s}
        told |= {f"{phase}_s": own + untimed_s.get(phase, 0.0) for phase, own in self._parts_s.items()}
        self._parts_s = dict.fromkeys(_PARTS, 0.0)
        self._steps, self._step_s, self._paused_s = 0, 0.0, 0.0
        return {name: value for name, value in told.items() if value}


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
        """Whether what is told the GPU here is told the stream that computes."""
        return torch.cuda.current_stream(self._device) == self._stream

    def note_stream(self) -> None:
        """The engine is called."""
        self._stream = torch.cuda.current_stream(self._device)

    def is_known(self, stamp: torch.cuda.Event) -> bool:
        return bool(stamp.query())  # type: ignore[no-untyped-call]

    def give_back(self, stamps: list[torch.cuda.Event]) -> None:
        """They will be recorded again."""
        self._spare += stamps


def _between_clocks(since: float, until: float) -> float:
    return until - since


def _between_events(since: torch.cuda.Event, until: torch.cuda.Event) -> float:
    return max(0.0, float(since.elapsed_time(until)) / 1e3)  # of two streams it may be less
