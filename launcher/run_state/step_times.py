"""Where the time of a step goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

PHASES = ("forward", "backward", "optimizer", "comm", "data", "paused", "other")


class StepTimes(NamedTuple):
    """Seconds of a step in the mean of the last ones, in whole and by phase; the names are those of the sums.

    `comm` is what a rank waits for others and for the network, `data` for its samples; `paused` is saving,
    loading and evaluating.
    """

    step_s: float
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    comm_s: float = 0.0
    data_s: float = 0.0
    paused_s: float = 0.0

    @property
    def other_s(self) -> float:
        """What no phase accounts for."""
        return max(0.0, self.step_s - sum(self[1:]))

    @property
    def own_s(self) -> float:
        """Without pauses, and without waiting for others: what they may wait for."""
        return max(0.0, self.step_s - self.comm_s - self.paused_s)

    @property
    def has_phases(self) -> bool:
        """Whether more is told than how long a step takes."""
        return sum(self[1:]) > 0

    def share(self, phase: str) -> float:
        """A part of the step, 0 to 1."""
        if self.step_s <= 0:
            return 0.0
        return float(min(1.0, getattr(self, f"{phase}_s") / self.step_s))


class RecentSteps:
    """Adds up the steps of the last lines that a rank has told."""

    def __init__(self, num_lines: int = 10) -> None:
        self._lines: deque[tuple[float, tuple[float, ...]]] = deque(maxlen=num_lines)
        self._times: StepTimes | None = None  # of the lines, once it was asked for

    def add(self, row: Mapping[str, float]) -> bool:
        """What was told since the last time; whether there were steps in it."""
        steps = row.get("steps", 0.0)
        if not steps > 0 or not row.get("step_s", 0.0) > 0:
            return False
        self._lines.append((steps, tuple(max(0.0, row.get(name, 0.0)) for name in StepTimes._fields)))
        self._times = None
        return True

    def times(self) -> StepTimes | None:
        """None before the first step."""
        if self._times is None and self._lines:
            num_steps = sum(steps for steps, _ in self._lines)
            columns = zip(*(sums for _, sums in self._lines), strict=True)
            self._times = StepTimes(*(sum(one) / num_steps for one in columns))
        return self._times
