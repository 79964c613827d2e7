"""Where the time of a step goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from .metric_table import OTHER, PAUSE, PHASES, WAITING, names_of
from .values import mean_of

_SUMS = ("step_s", *(f"{name}_s" for name in PHASES))
_NOT_OWN = names_of(WAITING, PAUSE)


class StepTimes:
    """Seconds of a step in the mean of the last ones, in whole and by phase."""

    def __init__(self, seconds: Iterable[float]) -> None:
        """`seconds` are those of a step, and of its phases in the order of their table."""
        self._seconds = dict(zip(_SUMS, seconds, strict=True))
        self.step_s = self._seconds["step_s"]
        self._told_s = sum(self._seconds.values()) - self.step_s

    @property
    def own_s(self) -> float:
        """Without pauses, and without waiting for others: what they may wait for."""
        return max(0.0, self.step_s - sum(self._seconds[name] for name in _NOT_OWN))

    @property
    def has_phases(self) -> bool:
        """Whether more is told than how long a step takes."""
        return self._told_s > 0

    def seconds(self, phase: str) -> float:
        """Of a phase, or of what none accounts for."""
        if phase == OTHER:
            return max(0.0, self.step_s - self._told_s)
        return self._seconds[f"{phase}_s"]

    def share(self, phase: str) -> float:
        """A part of the step, 0 to 1."""
        return min(1.0, self.seconds(phase) / self.step_s) if self.step_s > 0 else 0.0

    @classmethod
    def mean(cls, all_times: Iterable[StepTimes]) -> StepTimes | None:
        """Of several ranks; None of none."""
        rows = [one._seconds.values() for one in all_times]
        return cls(sum(column) / len(rows) for column in zip(*rows, strict=True)) if rows else None


class RecentSteps:
    """Adds up the steps of the last lines that a rank has told."""

    def __init__(self, num_lines: int = 10) -> None:
        self._lines: deque[tuple[float, list[float]]] = deque(maxlen=num_lines)
        self._times: StepTimes | None = None  # of the lines, once it was asked for
        self.num_steps = self.seconds = 0.0  # of all lines

    def add(self, row: Mapping[str, Any]) -> bool:
        """What was told since the last time; whether there were steps in it."""
        steps, step_s = mean_of(row.get("steps")) or 0.0, mean_of(row.get("step_s")) or 0.0
        if not (steps > 0 and step_s > 0):
            return False
        self._lines.append((steps, [max(0.0, mean_of(row.get(name)) or 0.0) for name in _SUMS]))
        self._times = None
        self.num_steps += steps
        self.seconds += step_s
        return True

    def times(self) -> StepTimes | None:
        """None before the first step."""
        if self._times is None and self._lines:
            num_steps = sum(steps for steps, _ in self._lines)
            columns = zip(*(sums for _, sums in self._lines), strict=True)
            self._times = StepTimes(sum(one) / num_steps for one in columns)
        return self._times
