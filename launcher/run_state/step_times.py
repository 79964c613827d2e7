"""The parts of the time of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

from .metric_table import OTHER, PAUSE, PHASES, WAITING, names_of
from .values import mean_of

_SUMS = ("step_s", *(f"{name}_s" for name in PHASES))


class StepTimes:
    """Seconds of one step, or of several, in whole and by phase."""

    def __init__(self, seconds: Iterable[float]) -> None:
        """`seconds` are those of the whole step, and of the phases in the order of their table."""
        self._seconds = dict(zip(_SUMS, seconds, strict=True))
        self.step_s = self._seconds["step_s"]
        self._told_s = sum(self._seconds.values()) - self.step_s

    @property
    def own_s(self) -> float:
        """Seconds without pauses, and without waiting for others: the others may wait for them."""
        return max(0.0, self.step_s - self.of(WAITING, PAUSE))

    @property
    def has_phases(self) -> bool:
        """Tell whether more is reported than the length of a step."""
        return self._told_s > 0

    def seconds(self, phase: str) -> float:
        """Return the seconds of a phase, or of the rest."""
        if phase == OTHER:
            return max(0.0, self.step_s - self._told_s)
        return self._seconds[f"{phase}_s"]

    def of(self, *kinds: str) -> float:
        """Return the seconds of all phases of these kinds."""
        return sum(self._seconds[name] for name in names_of(*kinds))

    def share(self, phase: str) -> float:
        """Return a phase's part of the step, 0 to 1."""
        return min(1.0, self.seconds(phase) / self.step_s) if self.step_s > 0 else 0.0

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> StepTimes:
        """Read a report, of several ranks the mean; a value that is no time is 0."""
        told = (mean_of(row.get(name)) or 0.0 for name in _SUMS)
        return cls(one if 0 <= one < inf else 0.0 for one in told)

    @classmethod
    def mean(cls, all_times: Sequence[StepTimes], num: float | None = None) -> StepTimes | None:
        """Return the mean of so many, else of all; None of an empty list."""
        columns = zip(*(one._seconds.values() for one in all_times), strict=True)
        return cls(sum(one) / (num or len(all_times)) for one in columns) if all_times else None


class RecentSteps:
    """Adds up the steps of a rank's last reports."""

    def __init__(self, num_lines: int = 10) -> None:
        self._lines: deque[tuple[float, StepTimes]] = deque(maxlen=num_lines)
        self._times: StepTimes | None = None  # sum of the lines, once it was asked for
        self._has_first = True  # the rank's first report is still in the lines
        self.num_steps = self.seconds = 0.0  # sums of all lines

    def add(self, row: Mapping[str, Any]) -> bool:
        """Add a report; tell whether there were steps in it."""
        steps = mean_of(row.get("steps")) or 0.0
        if not 0 < steps < inf:
            return False
        times = StepTimes.of_row(row)
        if not times.step_s:
            return False
        self._has_first = self._has_first and len(self._lines) < (self._lines.maxlen or 0)
        self._lines.append((steps, times))
        self._times = None
        self.num_steps += steps
        self.seconds += times.step_s
        return True

    def times(self) -> StepTimes | None:
        """Return the times; None before the first step."""
        if self._times is None and self._lines:
            steps, times = zip(*self._lines, strict=True)
            self._times = StepTimes.mean(times, sum(steps))
        return self._times

    def settled(self) -> tuple[float, StepTimes | None]:
        """Return the steps of the last reports and their times, without the rank's first report, in which a
        program warms up; with it, if there is no other.
        """
        lines = list(self._lines)
        if self._has_first and len(lines) > 1:
            del lines[0]
        if not lines:
            return 0.0, None
        steps, times = zip(*lines, strict=True)
        return sum(steps), StepTimes.mean(times, sum(steps))
