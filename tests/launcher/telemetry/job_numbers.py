"""Numbers of jobs as their hosts would tell them: ranks that wait for each other in every step."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dslaunch.launcher.inputs.line_prefix import Origin
from dslaunch.launcher.node.observe.metrics import FOLDED, add_own_time, fold
from dslaunch.launcher.telemetry.straggler_watch import FoundStraggler, StragglerWatch
from dslaunch.launcher.wire.frames import Metrics


class Step(NamedTuple):
    """What one rank does in one step, in seconds. `other_s`: in the engine, but no phase of a step."""

    forward_s: float = 0.03
    backward_s: float = 0.06
    optimizer_s: float = 0.01
    data_s: float = 0.002
    other_s: float = 0.001
    paused_s: float = 0.0
    state: str = ""

    @property
    def own_s(self) -> float:
        """All but waiting for others."""
        return sum(self[:6])


Work = Callable[[int, float], Step]  # of a rank at a time
NETWORK_S = 0.008  # in each step


class FakeJob:
    """`work` says what each rank does; all wait for the slowest in each step.

    `groups`: ranks that wait for each other, if these are not all.
    """

    def __init__(
        self,
        work: Work,
        *,
        hosts: Mapping[str, Sequence[int]],
        noise: float = 0.05,
        is_folding: bool = False,
        place_of: Callable[[int], str] = lambda rank: "",
        has_phases: bool = True,
        seed: int = 0,
    ) -> None:
        self.origins = [
            Origin(host, node, rank, place)
            for node, (host, ranks) in enumerate(hosts.items())
            for place, rank in enumerate(ranks)
        ]
        self.watch = StragglerWatch(self.origins, place_of=place_of)
        self.now = 0.0
        self.news: list[FoundStraggler] = []
        self._work, self._hosts, self._noise, self._is_folding = work, hosts, noise, is_folding
        self._has_phases = has_phases
        self._random = random.Random(seed)
        self._told_at = 0.0
        self.num_steps = 0

    def run(
        self, seconds: float, *, host_numbers: Callable[[str, float], dict[str, Any]] = lambda host, at: {}
    ) -> list[FoundStraggler]:
        """Go on for so long; returns what was news in this time."""
        begun, end = len(self.news), self.now + seconds
        told: dict[int, dict[str, Any]] = {}
        while self.now < end:
            self._step(told)
            if self.now - self._told_at >= 1.0:
                self._tell(told, host_numbers)
                told = {}
        return self.news[begun:]

    def _step(self, told: dict[int, dict[str, Any]]) -> None:
        steps = {one.rank: self._noisy(self._work(one.rank, self.now)) for one in self.origins}
        step_s = max(one.own_s for one in steps.values()) + NETWORK_S
        self.now += step_s
        self.num_steps += 1
        for rank, one in steps.items():
            row = told.setdefault(rank, {})
            numbers = {"steps": 1, "step_s": step_s, "comm_s": step_s - one.own_s, "data_s": one.data_s}
            if one.paused_s:
                numbers["paused_s"] = one.paused_s
            if self._has_phases:
                phases = (one.forward_s, one.backward_s, one.optimizer_s)
                numbers.update(zip(("forward_s", "backward_s", "optimizer_s"), phases, strict=True))
            for name, value in numbers.items():
                row[name] = row.get(name, 0.0) + value
            if one.state:
                row["state"] = one.state

    def _noisy(self, one: Step) -> Step:
        times = [value * self._random.uniform(1 - self._noise, 1 + self._noise) for value in one[:6]]
        return Step(*times, state=one.state)

    def _tell(
        self, told: dict[int, dict[str, Any]], host_numbers: Callable[[str, float], dict[str, Any]]
    ) -> None:
        self._told_at = self.now
        for place, (host, ranks) in enumerate(self._hosts.items()):
            rows: dict[int, dict[str, Any]] = {rank: told[rank] for rank in ranks if rank in told}
            if self._is_folding:
                add_own_time(rows)
                sent: dict[str, Any] = {FOLDED: fold(rows)}
            else:
                sent = {str(rank): row for rank, row in rows.items()}
            at_s = self.now + 0.05 * place  # not all at once
            self.watch.take(host, Metrics(0.0, sent, host_numbers(host, at_s)), at_s)
        self.news += self.watch.look(self.now + 0.3)


def hosts(num_hosts: int, num_ranks: int) -> dict[str, list[int]]:
    """So many hosts a, b, c with so many ranks each."""
    names = [chr(ord("a") + place) if num_hosts <= 26 else f"n{place}" for place in range(num_hosts)]
    return {name: list(range(place * num_ranks, (place + 1) * num_ranks)) for place, name in enumerate(names)}


def named(news: Sequence[FoundStraggler]) -> list[tuple[int, str, str]]:
    """Rank, host and cause of each."""
    return [(one.rank, one.host, one.cause) for one in news if not one.is_over]
