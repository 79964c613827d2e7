"""Phases of a rank from one optimizer step to the next: how long it computes, waits for others, and waits for
data.

A rank is in one phase at any time. A change of the phase leaves a mark: what begins, and when. On a CPU
that is the clock's time. A GPU works behind the program, so there the mark is an event in the stream that
computes, and times are read when the events have happened: nothing is waited for.

[Note: timed steps]
A mark costs some microseconds. All steps are timed where they take SHORT_S or more in the mean, and one in
eight where they are shorter. The other steps leave one mark, at their end, and marks around a pause or an
evaluation; they are taken to have the same parts as the short timed steps of the same line. An
untimed step that took SHORT_S or more has a reason of its own, and its time is in no phase. Ranks choose by
the number of the step, so what one of them waits for is seen on another one.

[Note: gaps]
Between two calls of the engine it is the next call that says what the program did meanwhile, and the marks
of a gap are named then. Before a forward the program got its data, as before an evaluation; between a
forward and the backward it computed the loss, or ran the forward by itself; between a forward and a step
without engine.backward() it ran the backward by itself, and so before the end of another micro batch. An
evaluation between two steps lasts up to the next call that trains; after one inside of a step, as of a
teacher, the step goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from time import perf_counter as clock_s
from typing import Any

import torch

FORWARD, BACKWARD, OPTIMIZER, COMM, DATA = "forward", "backward", "optimizer", "comm", "data"
PAUSED = "paused"  # saving or loading
EVALUATING = "evaluating"  # a forward that is part of no step
SHORT_S = 0.005  # steps with this mean or a longer one are all timed, of shorter ones few
_EVALUATED = "evaluated"  # an evaluation between two steps, whose call has ended
_UNTIMED = "untimed"
# Gaps: before the first call of a micro batch, and after a forward or a backward in it.
_BETWEEN, _INSIDE = "between", "inside"
_GAPS = (_BETWEEN, _INSIDE)
_PARTS = (FORWARD, BACKWARD, OPTIMIZER, COMM, DATA)
_WHOLE = (PAUSED, EVALUATING, _EVALUATED)  # phases that include waits for others
_HAS_NO_WAITS = (*_WHOLE, COMM, _UNTIMED)
_COMPUTES = (FORWARD, BACKWARD, OPTIMIZER)
_RUNS_BACKWARD = (BACKWARD, _INSIDE)  # phases whose backward may run in another thread: autograd's, on a GPU
_MEANT = {
    FORWARD: DATA,
    DATA: DATA,
    EVALUATING: DATA,
    BACKWARD: FORWARD,
    OPTIMIZER: BACKWARD,
}  # by the call that follows
_ONE_IN = 8
_NOTHING: AbstractContextManager[None] = nullcontext()
_MOST_MARKS = 4096  # above so many, times are read before the step ends


class _Mark:
    """A phase begins."""

    __slots__ = ("at", "phase")

    def __init__(self, phase: str, at: Any) -> None:
        self.phase = phase  # in a gap its kind, until its meaning is known: then its phase
        self.at = at  # seconds, or an event of a GPU


class _StepEnd(_Mark):
    """A step ends, and a gap begins."""

    __slots__ = ()


class Phases:
    """The times of one process.

    Units: seconds
    """

    def __init__(self, device: torch.device) -> None:
        self.is_timed = True  # the step that is being made
        self._times_all = True  # True until it is known how long steps are
        self._events = _Events(device) if device.type == "cuda" else None
        self._now: Callable[[], Any] = self._events.now if self._events else clock_s
        self._marks: list[_Mark] = []  # the oldest first
        self._gap: list[_Mark] = []  # marks among them whose phase the next call of the engine tells
        self._phase = _BETWEEN
        self._thread = get_ident()  # the thread that calls the engine
        self._sums = _Sums()

    # ---- marks

    def begin_wait(self) -> str | None:
        """A wait for others begins, in a step that is timed; return the phase that it is in, for `end_wait`,
        or None if it is not the program's: another thread, or another stream, waits.
        """
        before = self._phase
        if before in _HAS_NO_WAITS or (get_ident() != self._thread and before not in _RUNS_BACKWARD):
            return None
        if self._events is not None and not self._events.is_seen():
            return None
        self._phase = COMM
        self._marks.append(_Mark(COMM, self._now()))
        return before

    def end_wait(self, before: str) -> None:
        """End the wait that `begin_wait` has begun."""
        self._mark(before)

    def during(self, phase: str) -> AbstractContextManager[None]:
        """Around a call of the engine, which is this phase."""
        if self.is_timed or phase in _WHOLE:
            return During(self, phase)
        if self._phase in _GAPS:
            self._name_gap(_UNTIMED)
            self._phase = _UNTIMED
        elif self._phase == _EVALUATED:
            self._mark(_UNTIMED)
        return _NOTHING

    def begin_call(self, phase: str) -> str:
        """The engine is called: this thread, and on a GPU the stream, is where it computes. Return the phase
        that the call is in, for `end_call`.
        """
        self._thread = get_ident()
        before = self._phase
        if self._gap and phase != PAUSED and not (phase == EVALUATING and before == _INSIDE):
            self._name_gap(_MEANT[phase])
        self._look_around()
        if before != phase:
            self._mark(phase)
        return _BETWEEN if before == _EVALUATED and phase not in _WHOLE else before

    def end_call(self, phase: str, before: str) -> None:
        """End the call that `begin_call` has begun."""
        if before == phase:
            return
        if before == _BETWEEN and phase == EVALUATING:
            self._phase = _EVALUATED
        else:
            self._mark(_INSIDE if before == _BETWEEN and phase in _COMPUTES else before)

    def end_micro_batch(self) -> None:
        """A micro batch has ended, and no step."""
        if self._phase == _INSIDE:
            self._name_gap(BACKWARD)
            self._look_around()
            self._mark(_BETWEEN)

    def end_step(self, next_step: int) -> None:
        """An optimizer step has ended; the next one has this number, the same on all ranks."""
        self._name_gap(OPTIMIZER if self.is_timed else _UNTIMED)
        self._look_around()
        self.is_timed = self._times_all or is_one_in_eight(next_step)
        self._mark(_BETWEEN, _StepEnd)

    def _mark(self, phase: str, kind: type[_Mark] = _Mark) -> None:
        self._phase = phase
        mark = kind(phase, self._now())
        self._marks.append(mark)
        if phase in _GAPS:
            self._gap.append(mark)

    def _name_gap(self, phase: str) -> None:
        for mark in self._gap:
            mark.phase = phase
        self._gap.clear()

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
        count = len(self._marks)
        while count and not isinstance(self._marks[count - 1], _StepEnd):
            count -= 1
        known = self._num_known(count)
        while known and not isinstance(self._marks[known - 1], _StepEnd):
            known -= 1
        self._read(known)
        times = self._sums.take()
        if times:
            mean_s = (times.get("step_s", 0.0) - times.get("paused_s", 0.0)) / times["steps"]
            self._times_all = mean_s >= SHORT_S
        return times

    def _read_early(self) -> None:
        """Read marks of a GPU that are far behind the last one, since there are many."""
        count = len(self._marks)
        if self._events is not None:
            count = self._num_known(count // 2)
        if self._gap:
            count = min(count, self._marks.index(self._gap[0]) + 1)
        self._read(count)

    def _num_known(self, count: int) -> int:
        """Return how many of the first `count` marks have happened, one after the other: those of a stream
        that the last one did not wait for may be late.
        """
        if self._events is None:
            return count
        marks = enumerate(self._marks[:count])
        return next((number for number, mark in marks if not self._events.is_known(mark.at)), count)

    def _read(self, count: int) -> None:
        """Add up what is between the first `count` marks; the last of them is the first from then on."""
        if count < 2:
            return
        self._sums.add(self._marks[:count], _between_clocks if self._events is None else _between_events)
        if self._events is not None:
            self._events.give_back([mark.at for mark in self._marks[: count - 1]])
        del self._marks[: count - 1]


class During:
    """The call inside is a phase."""

    __slots__ = ("_before", "_phase", "_phases")

    def __init__(self, phases: Phases, phase: str) -> None:
        self._phases, self._phase = phases, phase

    def __enter__(self) -> None:
        self._before = self._phases.begin_call(self._phase)

    def __exit__(self, *_: object) -> None:
        self._phases.end_call(self._phase, self._before)


def is_one_in_eight(step: int) -> bool:
    """Return whether a step, counted from 1, is one of those that are always timed: the first of the first
    eight, the second of the next eight and so on, so what happens at each 2nd, 4th or 8th step is timed as
    often as it happens.
    """
    return step % _ONE_IN == step // _ONE_IN % _ONE_IN


class _Sums:
    """Times by phase: of steps that have ended, and of the one that has not."""

    def __init__(self) -> None:
        # times of the step under way
        self._step: dict[str, float] = dict.fromkeys((*_PARTS, *_WHOLE, _UNTIMED), 0.0)
        self._steps, self._step_s, self._paused_s = 0, 0.0, 0.0  # since they were taken
        self._saving_s = 0.0  # saving and loading alone
        self._parts_s = dict.fromkeys(_PARTS, 0.0)  # timed steps
        self._short_s = dict.fromkeys(_PARTS, 0.0)  # short timed steps alone
        self._like_s = dict.fromkeys(_PARTS, 0.0)  # the same, the last time that there were some
        self._untimed_s = 0.0  # short untimed steps, to be divided

    def add(self, marks: Sequence[_Mark], between: Callable[[Any, Any], float]) -> None:
        """Add the times between these marks."""
        step, mark = self._step, marks[0]
        for following in marks[1:]:
            step[mark.phase] += between(mark.at, following.at)
            if isinstance(following, _StepEnd):
                self._end_step()
            mark = following

    def _end_step(self) -> None:
        step = self._step
        parts_s, untimed_s = [step[phase] for phase in _PARTS], step[_UNTIMED]
        paused_s = step[PAUSED] + step[EVALUATING] + step[_EVALUATED]
        own_s = sum(parts_s) + untimed_s
        self._steps += 1
        self._step_s += own_s + paused_s
        self._paused_s += paused_s
        self._saving_s += step[PAUSED]
        sums = [self._parts_s]
        if own_s < SHORT_S:
            self._untimed_s += untimed_s
            if not untimed_s:
                sums.append(self._short_s)
        for into in sums:
            for phase, seconds in zip(_PARTS, parts_s, strict=True):
                into[phase] += seconds
        for phase in step:
            step[phase] = 0.0

    def take(self) -> dict[str, float]:
        """Return the sums of steps that have ended, once."""
        if not self._steps:
            return {}
        if any(self._short_s.values()):
            self._like_s, self._short_s = self._short_s, dict.fromkeys(_PARTS, 0.0)
        share = self._untimed_s / (sum(self._like_s.values()) or 1.0)
        times = {"steps": self._steps, "step_s": self._step_s, "paused_s": self._paused_s}
        times["saving_s"] = self._saving_s
        times |= {f"{phase}_s": own_s + share * self._like_s[phase] for phase, own_s in self._parts_s.items()}
        self._steps, self._step_s, self._paused_s, self._untimed_s = 0, 0.0, 0.0, 0.0
        self._saving_s = 0.0
        self._parts_s = dict.fromkeys(_PARTS, 0.0)
        return {name: value for name, value in times.items() if value}


class _Events:
    """Marks of the GPU's place in its stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)  # the stream that computes
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
        """Take events back, to be recorded again."""
        self._spare += stamps


def _between_clocks(since: float, until: float) -> float:
    return until - since


def _between_events(since: torch.cuda.Event, until: torch.cuda.Event) -> float:
    return max(0.0, float(since.elapsed_time(until)) / 1e3)  # below 0 for events of two streams
