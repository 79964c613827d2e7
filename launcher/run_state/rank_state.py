"""What is known of one rank, of the ranks of a host that are told of together, and of one host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from .series import Series
from .step_times import RecentSteps, StepTimes
from .values import items, number, numbers, text, whole

MAX_NAMES = 200
SERIES = ("loss", "step_s", "comm_s", "data_s", "mem_used")  # that are kept of a rank over time


class Spread(NamedTuple):
    """Of a number of several ranks: the extremes, whose they are, and the mean."""

    least: float
    mean: float
    most: float
    rank_of_least: int
    rank_of_most: int


class NumbersOverTime:
    """The newest value of each name, and some over time; bounded, whatever a program tells."""

    def __init__(self, num_points: int) -> None:
        self.values: dict[str, float] = {}
        self.at = 0.0  # when something was told last
        self.step_at = 0.0  # when the last step was told; 0: none
        self.series: dict[str, Series] = {}
        self.recent = RecentSteps()
        self._num_points = num_points

    @property
    def times(self) -> StepTimes | None:
        """Of the last steps; None before the first."""
        return self.recent.times()

    def value(self, name: str) -> float | None:
        """None if it was not told."""
        return self.values.get(name)

    @property
    def step(self) -> int | None:
        """Optimizer steps done."""
        found = self.values.get("step")
        return int(found) if found is not None and math.isfinite(found) else None

    @property
    def mem_share(self) -> float | None:
        """Of the memory that there is, 0 to 1."""
        used, total = self.values.get("mem_used"), self.values.get("mem_total")
        if used is None or not total or not math.isfinite(used / total):
            return None
        return min(1.0, max(0.0, used / total))

    def take_row(self, at: float, row: Mapping[str, float]) -> None:
        """What was told at this time."""
        self.at = at
        before = self.step
        for name, value in row.items():
            if name in self.values or len(self.values) < MAX_NAMES:
                self.values[name] = value
        if self.recent.add(row) or self.step != before:
            self.step_at = at
        if self._num_points:
            self._keep(at, row)

    def _keep(self, at: float, row: Mapping[str, float]) -> None:
        steps = row.get("steps", 0.0)
        for name in SERIES:
            value = row.get(name)
            if value is None or (name.endswith("_s") and not steps > 0):
                continue
            shown = value / steps if name.endswith("_s") else value
            self.series.setdefault(name, Series(self._num_points)).add(at, shown)


class RankState(NumbersOverTime):
    """One rank of the attempt that runs, or of the last one."""

    def __init__(self, rank: int, host: str, local_rank: int, *, num_points: int = 0) -> None:
        super().__init__(num_points)
        self.rank, self.host, self.local_rank = rank, host, local_rank
        self.pid = 0  # 0: its process does not run yet
        self.doing = ""  # `saving` and the like; empty: it trains
        self.num_lines = 0  # of output
        self.lines_per_s = 0.0
        self.exit_code: int | None = None
        self.signal = 0
        self.has_hang = False  # a watchdog has told of it, and no step came since

    def take(self, at: float, row: Mapping[str, Any]) -> None:
        """What it told."""
        before = self.step_at
        self.take_row(at, numbers(row))
        if self.step_at != before:
            self.has_hang = False
            self.doing = ""
        if "state" in row:
            self.doing = text(row["state"])


class FoldedRanks(NumbersOverTime):
    """The ranks of one host of a large job, of which only extremes and means are told.

    What stands for all of them, as in `values`, is the mean.
    """

    def __init__(self, host: str, *, num_points: int = 0) -> None:
        super().__init__(num_points)
        self.host = host
        self.spreads: dict[str, Spread] = {}
        self._num_steps = 0.0

    def take(self, at: float, row: Mapping[str, Any]) -> None:
        """What was told of them."""
        told: dict[str, Spread] = {}
        for name, value in row.items():
            found = spread_of(value)
            if found is not None and (name in self.spreads or len(self.spreads) < MAX_NAMES):
                told[name] = found
        has_steps = "steps" in told and told["steps"].mean > 0
        for name, one in told.items():
            if has_steps or not name.endswith("_s"):  # else what is known of the last steps stays
                self.spreads[name] = one
        if has_steps:
            self._num_steps = told["steps"].mean
        self.take_row(at, {name: one.mean for name, one in told.items()})

    def per_step(self, name: str) -> Spread | None:
        """Of a sum of seconds what is told of the last steps, for one step."""
        found = self.spreads.get(name)
        if found is None or self._num_steps <= 0:
            return None
        least, mean, most = (one / self._num_steps for one in found[:3])
        return Spread(least, mean, most, found.rank_of_least, found.rank_of_most)


class HostState:
    """One host: what it tells of itself."""

    def __init__(self, host: str, *, num_points: int = 0) -> None:
        self.host = host
        self.at = 0.0
        self.values: dict[str, float] = {}
        self.gpus: tuple[dict[str, float], ...] = ()
        self.series: dict[str, Series] = {}
        self._num_points = num_points

    def take(self, at: float, row: Mapping[str, Any]) -> None:
        """What it told."""
        self.at = at
        told = numbers(row)
        for name, value in told.items():
            if name in self.values or len(self.values) < MAX_NAMES:
                self.values[name] = value
        if "gpus" in row:
            self.gpus = tuple(numbers(one) for one in items(row["gpus"]))
        if self._num_points:
            gpu = self.gpu_mean("util")
            for name, value in {**told, **({} if gpu is None else {"gpu_util": gpu})}.items():
                if name in self.series or len(self.series) < MAX_NAMES:
                    self.series.setdefault(name, Series(self._num_points)).add(at, value)

    def gpu_mean(self, name: str) -> float | None:
        """The mean of its GPUs; None if none of them tells it."""
        told = [one[name] for one in self.gpus if name in one]
        return sum(told) / len(told) if told else None

    def gpu_sum(self, name: str) -> float | None:
        """The sum of its GPUs; None if none of them tells it."""
        told = [one[name] for one in self.gpus if name in one]
        return sum(told) if told else None

    @property
    def mem_share(self) -> float | None:
        """Of its memory, 0 to 1."""
        used, total = self.values.get("mem_used"), self.values.get("mem_total")
        return None if used is None or not total else min(1.0, max(0.0, used / total))


def spread_of(value: Any) -> Spread | None:
    """Five numbers as events have them; None if it is not that."""
    found = items(value)
    if len(found) != 5:
        return None
    least, mean, most = (number(one) for one in found[:3])
    ranks = [whole(one) for one in found[3:]]
    if least is None or mean is None or most is None or ranks[0] is None or ranks[1] is None:
        return None
    return Spread(least, mean, most, ranks[0], ranks[1])
