"""The numbers of a run on a page: over time, and in sum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..run_state.attempt import AttemptState
from ..run_state.metric_table import OF_HOSTS, PAUSE, PHASES, RANK, WAITING, names_of
from ..run_state.rank_state import HostNumbers, NumberSource
from ..run_state.run_state import Observer, RunState
from ..run_state.series import MAX_AT, MAX_POINTS, Curve, Spread, single

MEMORY_PARTS = {name: one.part for name, one in RANK.items() if one.part}
REST = "rest"  # the part of a step that no phase accounts for
MAX_CUSTOM = 12  # names of the program's own
MAX_RANKS = 4096  # ranks whose totals are kept
MAX_HOSTS = 2048
MAX_STATES = 500
_PHASES = tuple(f"{name}_s" for name in PHASES)

Spreads = Mapping[str, Sequence[Spread]]  # by the name of the number


@dataclass(slots=True)
class Totals:
    """Sums and last numbers of one rank, or of the ranks of one host."""

    seconds: dict[str, float] = field(default_factory=dict)
    steps: float = 0.0
    memory: dict[str, float] = field(default_factory=dict)
    peak: float = 0.0


@dataclass(slots=True)
class HostCurves:
    """Last numbers of a host, and the means and the greatest of those that change."""

    last: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)
    num: int = 0
    num_gpus: int = 0


class Shares:
    """Seconds by phase and steps, added up over stretches of time: the parts of a step, over time."""

    def __init__(self, *, max_points: int = MAX_POINTS // 2) -> None:
        self._width, self._max_points = 0.05, max_points
        self._buckets: dict[tuple[int, int], dict[str, float]] = {}

    def add(self, at: float, attempt: int, seconds: Mapping[str, float]) -> None:
        """`seconds` has `steps`, too."""
        if not abs(at) <= MAX_AT:
            return
        _add_to(self._buckets.setdefault((attempt, math.floor(at / self._width)), {}), seconds)
        while len(self._buckets) > self._max_points and self._width < 1e12:
            self._width *= 2
            before, self._buckets = self._buckets, {}
            for (number, place), row in before.items():
                _add_to(self._buckets.setdefault((number, place // 2), {}), row)

    def points(self) -> Iterator[tuple[float, int, dict[str, float]]]:
        """Yield the middle of each stretch, its attempt, and seconds by phase in a step."""
        for (attempt, place), row in sorted(self._buckets.items()):
            steps = row.get("steps", 0.0)
            if steps > 0:
                at = (place + 0.5) * self._width
                yield at, attempt, {name: value / steps for name, value in row.items() if name != "steps"}

    def __bool__(self) -> bool:
        return any(row.get("steps", 0.0) > 0 for row in self._buckets.values())


def _add_to(known: dict[str, float], row: Mapping[str, float]) -> None:
    for name, value in row.items():
        known[name] = known.get(name, 0.0) + value


class Curves(Observer):
    """`over_time` are over seconds since the start of the run, `over_steps` over steps; `states` are
    activities of ranks besides training: begin, end, and name.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self.over_time: dict[str, Curve] = {}
        self.over_steps: dict[str, Curve] = {}
        self.of_hosts: dict[str, Curve] = {}
        self.shares = Shares()
        self.totals: dict[str, Totals] = {}
        self.hosts: dict[str, HostCurves] = {}
        self.states: list[tuple[float, float, str]] = []
        # steps between the reports that counted them, and the time of these
        self.stepped = self.stepped_s = 0.0
        self._step_before: tuple[float, float] | None = None
        self._custom: set[str] = set()
        self._doing: dict[str, int] = {}  # the state of each rank that does not train

    def began(self, attempt: AttemptState) -> None:
        """Reset for an attempt: counters may go back, and no rank has a state yet."""
        self._step_before = None
        self._doing.clear()

    def told(
        self,
        at: float,
        sources: Sequence[NumberSource],
        hosts: Sequence[HostNumbers],
        lines: Mapping[int, int],
    ) -> None:
        at -= self._state.began_at
        spreads: dict[str, list[Spread]] = {}
        seconds: dict[str, float] = {}
        for source in sources:
            row = dict(source.spreads())
            for name, one in row.items():
                spreads.setdefault(name, []).append(one)
            self._add_state(at, source)
            self._add_totals(source.key, row, seconds)
        if seconds.get("steps", 0.0) > 0:
            self.shares.add(at, self._attempt, seconds)
            self._add_step_time(at, spreads)
        self._add_curves(at, spreads, self._add_steps(at, spreads))
        of_hosts: dict[str, list[Spread]] = {}
        for host in hosts:
            self._add_host(host)
            for name, value in host.told.items():
                if name in OF_HOSTS and OF_HOSTS[name].label:
                    of_hosts.setdefault(name, []).append(single(host.host, value))
        for name, its_spreads in of_hosts.items():
            self.of_hosts.setdefault(name, Curve()).add(at, self._attempt, its_spreads)

    def made(self, at: float, name: str, value: float, passed_s: float) -> None:
        one = Spread("", value, value, value, "", "", passed_s)
        self._add(at - self._state.began_at, name, [one])

    @property
    def _attempt(self) -> int:
        return 0 if self._state.attempt is None else self._state.attempt.number

    def _add(self, at: float, name: str, spreads: Sequence[Spread]) -> None:
        self.over_time.setdefault(name, Curve()).add(at, self._attempt, spreads)

    def _add_state(self, at: float, source: NumberSource) -> None:
        """Add a rank's state, which lasts until its next report: a rank that saves reports the begin and the
        end.
        """
        states, before = self.states, self._doing.pop(source.key, None)
        if before is not None:
            begin, _, name = states[before]
            states[before] = begin, at, name
        told = source.told.get("state")
        if not isinstance(told, str) or len(self._doing) >= MAX_RANKS:
            return
        state = told[:40]
        others = self._doing.values() if before is None else (before, *self._doing.values())
        place = next((one for one in others if states[one][2] == state), None)
        if place is None and len(states) < MAX_STATES:
            place = len(states)
            states.append((at, at, state))
        if place is not None:
            self._doing[source.key] = place

    def _add_totals(self, key: str, row: Mapping[str, Spread], seconds: dict[str, float]) -> None:
        """Add the time of each phase: of one rank, and in `seconds` of all present sources."""
        if key not in self.totals and len(self.totals) >= MAX_RANKS:
            return
        totals = self.totals.setdefault(key, Totals())
        known = {name: one for name, one in row.items() if math.isfinite(one.mean)}
        weight = next((one.weight for one in row.values()), 1.0)
        steps = known["steps"].mean if "steps" in known else 0.0
        totals.steps += steps
        seconds["steps"] = seconds.get("steps", 0.0) + steps * weight
        took = {name: known[name].mean if name in known else 0.0 for name in (*_PHASES, "step_s")}
        step_s = took.pop("step_s")
        took[REST] = max(0.0, step_s - sum(took.values()))
        for name, value in took.items():
            seconds[name] = seconds.get(name, 0.0) + value * weight
        for name, value in {**took, "step_s": step_s}.items():
            totals.seconds[name] = totals.seconds.get(name, 0.0) + value
        for name in (*MEMORY_PARTS, "mem_used", "mem_total"):
            if name in row:
                totals.memory[name] = known[name].mean if name in known else 0.0
        most = [row[name].high for name in ("mem_peak", "mem_used") if name in row]
        totals.peak = max(totals.peak, *filter(math.isfinite, most), 0.0)

    def _add_step_time(self, at: float, spreads: Spreads) -> None:
        """Add the seconds of a step, and a rank's own part of them: without its waits for others."""
        by_key = {name: {one.key: one for one in told} for name, told in spreads.items()}
        known = by_key.get("own_s", {})
        step_s, own = [], []
        for one in spreads.get("step_s", ()):
            steps = by_key["steps"][one.key].mean if one.key in by_key["steps"] else 0.0
            if not steps > 0:
                continue
            step_s.append(one.scaled(1 / steps))
            waits, pauses = (
                [by_key[name][one.key] for name in names_of(kind) if one.key in by_key.get(name, {})]
                for kind in (WAITING, PAUSE)
            )
            if one.key in known:
                own.append(known[one.key].scaled(1 / steps))
            elif waits:
                rest_s = one.mean - sum(pause.mean for pause in pauses)
                high, mean, low = (
                    rest_s - sum(waited) for waited in zip(*(wait[1:4] for wait in waits), strict=True)
                )
                least = Spread(one.key, low, mean, high, waits[0].high_key, waits[0].low_key, one.weight)
                own.append(least.scaled(1 / steps))
        self._add(at, "step_s", step_s)
        self._add(at, "own_s", own)

    def _add_steps(self, at: float, spreads: Spreads) -> float:
        """Count the steps; return the step."""
        told = [one.high for one in spreads.get("step", ()) if math.isfinite(one.high)]
        if not told:
            return math.nan
        now, before = max(told), self._step_before
        self._step_before = at, now
        if before is not None and at > before[0] and now >= before[1]:
            self.stepped += now - before[1]
            self.stepped_s += at - before[0]
        return now

    def _add_curves(self, at: float, spreads: Spreads, step: float) -> None:
        for name, told in spreads.items():
            metric = RANK.get(name)
            if name.endswith("_s") or (metric is not None and not metric.label):
                continue
            if metric is None:
                if name not in self._custom and len(self._custom) >= MAX_CUSTOM:
                    continue
                self._custom.add(name)
            self._add(at, name, told)
            if math.isfinite(step) and (metric is None or metric.section == "training"):
                self.over_steps.setdefault(name, Curve(width=1.0)).add(step, 0, told)

    def _add_host(self, host: HostNumbers) -> None:
        if host.host not in self.hosts and len(self.hosts) >= MAX_HOSTS:
            return
        facts = self.hosts.setdefault(host.host, HostCurves())
        facts.num += 1
        facts.num_gpus = max(facts.num_gpus, len(host.gpus))
        for name, value in host.told.items():
            if math.isfinite(value):
                facts.last[name] = value
                facts.sums[name] = facts.sums.get(name, 0.0) + value
                facts.most[name] = max(facts.most.get(name, value), value)
