"""The time of a job by what it was spent on: steps that were kept, and what was lost to each cause.

[Note: How time is divided]
One rank's numbers say how far training was at which moment: the sum of its `step_s` since the attempt's first
step is the time from the beginning of that step to the end of the last one that is told. An attempt that
follows says at which step it went on, so the time of the steps behind that one was lost. All that lies
between is known from the moments of the attempts: a fault, the first step after it, the end of the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite
from typing import Any, NamedTuple

from ..wording import shown_time
from .attempt import AttemptState
from .metric_table import SPENT
from .rank_state import NumberSource
from .recovery import FIRST_STEP
from .values import mean_of

WORTH_SAYING_S = 0.05
MEAN_OF = 10  # points whose mean speed is taken for steps that no rank has told
MAX_POINTS = 400  # points of one attempt; then every second one is left out
USEFUL, START, RESTART, REDONE, SAVE, HANG, END = (
    "useful",
    "start",
    "restart",
    "redone",
    "save",
    "hang",
    "end",
)


class _Point(NamedTuple):
    """How far training is after a step: seconds since the beginning of the attempt's first step."""

    step: float
    trained_s: float
    saved_s: float


class _Course:
    """The steps of one attempt, as one of its ranks tells them."""

    def __init__(self, attempt: AttemptState, key: str) -> None:
        self.attempt, self.key = attempt, key
        self._points: list[_Point] = []
        self._first_s = 0.0  # seconds of the first step, which ends at the milestone of that name
        self._began_at = 0.0  # as the first report has it
        self.hang_at = 0.0

    def take(self, at: float, row: Mapping[str, Any]) -> None:
        """Take a report of the rank."""
        step, steps, step_s, saved_s = (
            mean_of(row.get(name)) for name in ("step", "steps", "step_s", "saving_s")
        )
        if step is None or not isfinite(step):
            return
        steps, step_s, saved_s = (
            one if one is not None and 0 <= one < inf else 0.0 for one in (steps, step_s, saved_s)
        )
        if not self._points:
            trained_s = max(0.0, step_s - saved_s)  # what it saved or loaded before its first forward
            self._points.append(_Point(step - steps, 0.0, 0.0))
            self._first_s = trained_s / max(1.0, steps)
            self._began_at = at - trained_s
            saved_s = 0.0
        else:
            trained_s = max(0.0, step_s - saved_s)
        last = self._points[-1]
        if steps and step > last.step:
            self._points.append(_Point(step, last.trained_s + trained_s, last.saved_s + saved_s))
        if len(self._points) > MAX_POINTS:
            self._points = [*self._points[:-1:2], self._points[-1]]

    @property
    def resumed_step(self) -> float:
        """The step from which the attempt went on."""
        return self._points[0].step

    @property
    def last_step(self) -> float:
        return self._points[-1].step

    @property
    def is_there(self) -> bool:
        return bool(self._points)

    @property
    def began_at(self) -> float:
        """The beginning of the first step."""
        for phase in self.attempt.phases:
            if phase.name == FIRST_STEP:
                return phase.ended_at - self._first_s
        return self._began_at

    @property
    def stepped_at(self) -> float:
        """The end of the last step that is known."""
        last = self._points[-1]
        return self.began_at + last.trained_s + last.saved_s

    @property
    def saved_s(self) -> float:
        return self._points[-1].saved_s

    def untold_s(self, limit: float) -> float:
        """Return the seconds of the steps after the last report up to that one, at the speed of those before.
        A rank that fails has not told its last ones, and the attempt after it may go on behind them.
        """
        told = self._points[-MEAN_OF:]
        num, seconds = told[-1].step - told[0].step, told[-1].trained_s - told[0].trained_s
        return 0.0 if limit == inf or num <= 0 else max(0.0, limit - told[-1].step) * seconds / num

    def trained_s(self, limit: float) -> float:
        """Return the seconds of the steps up to and with that one."""
        before = self._points[0]
        for point in self._points[1:]:
            if point.step > limit:
                share = max(0.0, (limit - before.step) / (point.step - before.step))
                return before.trained_s + share * (point.trained_s - before.trained_s)
            before = point
        return before.trained_s


class Goodput:
    """Keeps the courses of attempts, and sums of those that were dropped; `spent` divides the time."""

    def __init__(self) -> None:
        self._courses: dict[int, _Course] = {}
        self._dropped = dict.fromkeys(SPENT, 0.0)
        self._dropped_until = 0.0  # where the time of the attempts that are kept begins

    def take(self, at: float, attempt: AttemptState | None, sources: Sequence[NumberSource]) -> None:
        """Take reports of ranks, of which the first that tells of steps counts, rank 0 before others."""
        if attempt is None:
            return
        course = self._courses.get(attempt.number)
        if course is None:
            teller = next((one for one in sources if mean_of(one.told.get("step")) is not None), None)
            if teller is None:
                return
            course = self._courses[attempt.number] = _Course(attempt, teller.key)
        for source in sources:
            if source.key == course.key:
                course.take(at, source.told)
        if course.is_there:
            attempt.resumed_step, attempt.last_step = int(course.resumed_step), int(course.last_step)

    def hang(self, at: float, attempt: AttemptState | None) -> None:
        """Note that a collective does not end."""
        course = None if attempt is None else self._courses.get(attempt.number)
        if course is not None:
            course.hang_at = at

    def drop(self, attempt: AttemptState, later: Iterable[AttemptState], *, began_at: float) -> None:
        """Keep no more of the attempt, the first of those that are kept, than its seconds by cause."""
        courses = [self._courses.get(one.number) for one in later]
        kept = min((one.resumed_step for one in courses if one is not None and one.is_there), default=inf)
        course = self._courses.pop(attempt.number, None)
        if course is None or not course.is_there:
            return
        cause, now = (RESTART, self._dropped_until) if self._dropped_until else (START, began_at)
        self._dropped[cause] += max(0.0, course.began_at - now)
        self._dropped_until = _divide(self._dropped, attempt, course, kept)

    def spent(self, attempts: Iterable[AttemptState], *, began_at: float, at: float) -> dict[str, float]:
        """Return the seconds by cause, up to the present or the end of the job. While an attempt trains, what
        follows the last step that was told is left out.
        """
        found = dict(self._dropped)
        all_attempts = list(attempts)
        courses = [self._courses.get(one.number) for one in all_attempts]
        limits, limit = [], inf
        for course in reversed(courses):
            limits.append(limit)
            if course is not None and course.is_there:
                limit = min(limit, course.resumed_step)
        cause, now = (RESTART, self._dropped_until) if self._dropped_until else (START, began_at)
        for attempt, course, kept in zip(all_attempts, courses, reversed(limits), strict=True):
            if course is None or not course.is_there:
                continue
            found[cause] += max(0.0, course.began_at - now)
            now = _divide(found, attempt, course, kept)
            cause = RESTART
        verdict = all_attempts[-1].verdict if all_attempts else None
        if verdict is not None and verdict.exit_code == 0 and cause == RESTART:
            cause = END
        if verdict is not None or not courses or courses[-1] is None:
            found[cause] += max(0.0, at - now)
        return found


def _divide(found: dict[str, float], attempt: AttemptState, course: _Course, kept: float) -> float:
    """Add the time of one attempt from its first step on; return when it ends."""
    stepped_at = course.stepped_at
    until = max(stepped_at, attempt.fault_at)
    untold_s = min(course.untold_s(kept), until - stepped_at)
    useful_s = course.trained_s(kept) + untold_s
    culprit = {} if attempt.verdict is None else attempt.verdict.culprit
    is_hang = course.hang_at > stepped_at or culprit.get("kind") == "hang"  # by a watchdog, or a limit
    hang_s = until - stepped_at - untold_s if is_hang else 0.0
    found[USEFUL] += useful_s
    found[SAVE] += course.saved_s
    found[HANG] += hang_s
    found[REDONE] += max(0.0, until - course.began_at - useful_s - course.saved_s - hang_s)
    return until


def describe(spent: Mapping[str, float]) -> str:
    """Describe it in a line: the useful part, then the causes, the greatest first; empty before a step."""
    share = share_of(spent)
    if share is None:
        return ""
    lost = sorted(((one, name) for name, one in spent.items() if name != USEFUL), reverse=True)
    words = [f"{SPENT[name].label} {shown_time(one)}" for one, name in lost if one >= WORTH_SAYING_S]
    useful = f"{100 * share:.0f} % of {shown_time(sum(spent.values()))} in {SPENT[USEFUL].label}"
    return "; ".join(filter(None, (useful, ", ".join(words))))


def share_of(spent: Mapping[str, float]) -> float | None:
    """Return the useful part of the time, 0 to 1; None before the first step."""
    total = sum(spent.values())
    return spent[USEFUL] / total if total > 0 and spent[USEFUL] > 0 else None
