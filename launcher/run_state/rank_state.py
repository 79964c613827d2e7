"""The state of one rank, of the folded ranks of a host, and of one host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .metric_table import GPU, GPU_PREFIX
from .series import Spread
from .step_times import RecentSteps, StepTimes
from .values import items, mean_of, number, numbers, text

MAX_NAMES = 200
FOLDED = " *"  # at the end of a host's name: its ranks, which are reported together


class NumberSource:
    """One rank, or the folded ranks of a host, of whose numbers the least, the mean and the greatest are
    known. `key` is its name in events.

    `values` has the newest of each name, as reported; `told` the last report, and `told_of_steps` the last
    one about steps.
    """

    def __init__(self, key: str, host: str, num_ranks: int = 1) -> None:
        self.key, self.host, self.num_ranks = key, host, num_ranks
        self.values: dict[str, Any] = {}
        self.told: Mapping[str, Any] = {}
        self.told_of_steps: Mapping[str, Any] = {}
        self.at = 0.0  # time of the last report
        self.step_at = 0.0  # time of the last report of a step; 0: none
        self.recent = RecentSteps()
        self._step: float | None = None

    @property
    def times(self) -> StepTimes | None:
        """Times of the last steps; None before the first."""
        return self.recent.times()

    def value(self, name: str) -> float | None:
        """Return the newest value, of several ranks the mean; None if there is none."""
        return mean_of(self.values.get(name))

    def spreads(self) -> Iterator[tuple[str, Spread]]:
        """Yield the numbers of the last report."""
        for name, value in self.told.items():
            found = Spread.of(self.key, value, self.num_ranks)
            if found is not None:
                yield name, found

    @property
    def step(self) -> int | None:
        """Number of optimizer steps done."""
        return int(self._step) if self._step is not None and math.isfinite(self._step) else None

    @property
    def mem_share(self) -> float | None:
        """Part of the memory that is in use, 0 to 1."""
        return _share(self.value("mem_used"), self.value("mem_total"))

    def take(self, at: float, row: Mapping[str, Any]) -> None:
        """Take a report of it, or about it."""
        self.at, self.told = at, row
        _update(self.values, row)
        before, self._step = self._step, self.value("step")
        if (mean_of(row.get("steps")) or 0.0) > 0:
            self.told_of_steps = row
        if self.recent.add(row) or self._step != before:
            self.step_at = at


class RankState(NumberSource):
    """One rank, or one server, of the running attempt or of the last one."""

    def __init__(self, rank: int, host: str, local_rank: int) -> None:
        super().__init__(str(rank), host)
        self.rank, self.local_rank = rank, local_rank
        self.pid = 0  # 0: its process does not run yet
        self.doing = ""  # `saving` and the like; empty: it trains
        self.num_lines = 0  # lines of output
        self.lines_per_s = 0.0
        self.exit_code: int | None = None
        self.signal = 0
        self.has_hang = False  # a watchdog has reported it, and no step came since
        # A server has a number in the place of a rank, and a role.
        self.role = ""
        self.is_healthy = False
        self.num_restarts = 0

    def take(self, at: float, row: Mapping[str, Any]) -> None:
        before = self.step_at
        super().take(at, row)
        self.has_hang = self.has_hang and self.step_at == before
        self.doing = text(row.get("state"))  # it lasts until the next report


class HostNumbers:
    """The numbers of one host, and of its GPUs as `gpu_NAME`. They are made when they are asked for: a
    launcher of many hosts asks rarely.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.at = 0.0
        self._told: Mapping[str, Any] = {}
        self._known: dict[str, Any] = {}

    def take(self, at: float, row: Mapping[str, Any]) -> None:
        """Take a report of the host."""
        self.at, self._told = at, row
        _update(self._known, row)

    @property
    def told(self) -> dict[str, float]:
        """Return the last report."""
        return _numbers_of_host(self._told)

    @property
    def values(self) -> dict[str, float]:
        """Return the newest value of each name."""
        return _numbers_of_host(self._known)

    @property
    def gpus(self) -> list[dict[str, float]]:
        """Return the numbers of each of its GPUs."""
        return [numbers(one) for one in items(self._known.get("gpus"))]

    @property
    def mem_share(self) -> float | None:
        """Part of its memory that is in use, 0 to 1."""
        return _share(number(self._known.get("mem_used")), number(self._known.get("mem_total")))


def _numbers_of_host(row: Mapping[str, Any]) -> dict[str, float]:
    found = numbers(row)
    gpus = [numbers(one) for one in items(row.get("gpus"))]
    for name, metric in GPU.items() if gpus else ():
        each = [one[name] for one in gpus if name in one]
        if each:
            found[f"{GPU_PREFIX}{name}"] = _OF_GPUS[metric.of_gpus](each)
    return found


def _update(known: dict[str, Any], row: Mapping[str, Any]) -> None:
    if len(known) + len(row) <= MAX_NAMES:
        known.update(row)
    else:
        known.update((name, one) for name, one in row.items() if name in known or len(known) < MAX_NAMES)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


_OF_GPUS: dict[str, Callable[[list[float]], float]] = {"mean": _mean, "sum": sum, "max": max}


def _share(used: float | None, total: float | None) -> float | None:
    if used is None or not total or not math.isfinite(used / total):
        return None
    return min(1.0, max(0.0, used / total))
