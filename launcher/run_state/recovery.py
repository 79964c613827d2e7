"""The way from a fault of a job to its next step, moment by moment."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from ..wording import count, shown_time
from .attempt import AttemptState

FAULT, DETECTED, DECIDED, STOPPED = "fault", "detected", "decided", "stopped"
FIRST_STEP = "first step"


class Stage(NamedTuple):
    """A part of a recovery, which ends with a moment. `title` heads its column, and `help` explains it."""

    moment: str
    title: str
    help: str


STAGES = (
    Stage(DETECTED, "detect", "from the fault until the launcher knows of it"),
    Stage(DECIDED, "decide", "until it knows the culprit, and tells all hosts to stop"),
    Stage(STOPPED, "stop", "until no process of the attempt is left"),
    Stage("connected", "connect", "until the agents of all hosts of the next attempt have answered"),
    Stage("prepared", "prepare", "until all hosts are prepared, with the imports that their workers share"),
    Stage("started", "start", "until all workers run"),
    Stage("imported", "import", "until the last of them calls init_process_group"),
    Stage("process group", "groups", "until the last of them has its process group"),
    Stage("loaded", "load", "until the last of them has its model, and its checkpoint"),
    Stage(FIRST_STEP, "first step", "until a step is done"),
)


class Recovery(NamedTuple):
    """One start after a failure. `moments` has the seconds from the fault to each known moment, in the order
    of STAGES; `steps_again` is the number of steps that are done a second time, None where it is not known.
    """

    attempt: int  # the number of the start, from 0
    cause: str  # how the attempt before it ended
    fault_at: float
    moments: tuple[tuple[str, float], ...]
    steps_again: int | None = None

    @property
    def total_s(self) -> float | None:
        """Seconds from the fault to the first step after it; None before that."""
        return dict(self.moments).get(FIRST_STEP)

    @property
    def stages_s(self) -> dict[str, float]:
        """Seconds of each stage by its title, each from the end of the known one before. A rank may have its
        model a moment after another one has done the step: that is no part of the way.
        """
        found, before = {}, 0.0
        titles = {one.moment: one.title for one in STAGES}
        last = math.inf if self.total_s is None else self.total_s
        for moment, told_s in self.moments:
            at_s = min(told_s, last)
            found[titles[moment]] = max(0.0, at_s - before)
            before = max(before, at_s)
        return found

    @property
    def text(self) -> str:
        """Describe it in a sentence, once it is over; empty before that."""
        if self.total_s is None:
            return ""
        stages = ", ".join(f"{title} {seconds:.1f}" for title, seconds in self.stages_s.items())
        again = "" if self.steps_again is None else f"; {count(self.steps_again, 'step')} done again"
        return f"trained again {shown_time(self.total_s)} after the failure ({stages}){again}"

    def as_data(self) -> dict[str, object]:
        """Return it as an object of JSON."""
        return {
            "attempt": self.attempt,
            "cause": self.cause,
            "total_s": _rounded(self.total_s),
            "stages_s": {title: _rounded(seconds) for title, seconds in self.stages_s.items()},
            "steps_again": self.steps_again,
        }


def recoveries(attempts: Iterable[AttemptState]) -> list[Recovery]:
    """Return a record for each attempt that follows a failed one."""
    found: list[Recovery] = []
    before: AttemptState | None = None
    for attempt in attempts:
        made = None if before is None else _recovery(before, attempt)
        if made is not None:
            found.append(made)
        before = attempt
    return found


def _recovery(before: AttemptState, after: AttemptState) -> Recovery | None:
    fault_at = before.fault_at
    if not fault_at or before.verdict is None:
        return None
    at = {name: before.began_at + seconds for name, seconds in before.end_s.items()}
    at.update((phase.name, phase.ended_at) for phase in after.phases)
    moments = tuple((one.moment, at[one.moment] - fault_at) for one in STAGES if one.moment in at)
    again = None
    if before.last_step is not None and after.resumed_step is not None:
        again = max(0, before.last_step - after.resumed_step)
    return Recovery(after.number, before.verdict.text, fault_at, moments, again)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
