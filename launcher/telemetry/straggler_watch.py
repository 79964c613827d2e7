"""The recent reports of ranks and hosts, and new stragglers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ..inputs.line_prefix import Origin
from ..node.observe.links import OTHERS
from ..node.observe.metrics import FOLDED
from ..run_state.values import mapping
from ..wire.frames import Metrics
from ..wording import count, shown_size
from .slow_links import Look, Pair, SlowLink, find_slow_link
from .stragglers import (
    WINDOW_S,
    RankComparison,
    Slow,
    Times,
    compare,
    folded_rest_of,
    folded_times_of,
    times_of,
    window_of,
)

LOOK_EVERY_S = 1.0
COST = 0.01  # part of a core: in jobs of very many hosts it looks more rarely
QUIET_S = 60.0  # a straggler that was well meanwhile is not reported again within it; twice as long each time
MAX_QUIET_S = 3600.0
MAX_ROWS = 20_000  # rows per rank


class FoundStraggler(NamedTuple):
    """A rank or link that the other ranks wait for. Of a link, `rank` is the first one of its host.

    `share`: part of a step by which they wait longer. `is_over`: not any more, and there is no text.
    `is_said`: it gets a line, as it had none a short time ago.
    """

    rank: int
    host: str
    cause: str  # "compute", "data" or "link"
    share: float = 0.0
    text: str = ""
    is_over: bool = False
    is_said: bool = True


class StragglerWatch:
    """Looks for stragglers. All times are on the launcher's monotonic clock."""

    def __init__(
        self, origins: Iterable[Origin], *, place_of: Callable[[int], str] = lambda rank: ""
    ) -> None:
        """`place_of` returns the known place of a rank along the job's axes; the rank's own report goes
        before it.
        """
        self._host_of = {one.rank: one.host for one in origins}
        self._place_of = place_of
        self._places: dict[int, str] = {}
        self._series: dict[str, deque[Times]] = {}  # by rank, or by host where ranks are folded
        self._rests: dict[str, deque[Times]] = {}  # by host
        self._looks: dict[Pair, deque[Look]] = {}
        self._addresses: dict[str, str] = {}  # addresses of hosts; empty for one that several hosts claim
        self._told: set[tuple[int, str]] = set()  # known ranks and causes
        # end of the silence about it, and its length
        self._quiet: dict[tuple[int, str], tuple[float, float]] = {}
        self._newest = 0.0
        self._window_s = WINDOW_S
        self._look_at = 0.0

    def take(self, host: str, item: Metrics, at_s: float) -> None:
        """Take a report of a host about its ranks and itself, at that time."""
        self._newest = max(self._newest, at_s)
        for rank, place in mapping(item.host.get("places")).items():
            self._places[int(rank)] = place
        for rank, row in item.ranks.items():
            if rank == FOLDED:
                self._keep(self._series, f"{host} {FOLDED}", folded_times_of(at_s, row))
                self._keep(self._rests, f"{host} {FOLDED}", folded_rest_of(at_s, row))
            else:
                self._keep(self._series, rank, times_of(at_s, int(rank), row))
        self._take_links(host, mapping(item.host.get("links")), at_s)

    def look(self, now: float) -> list[FoundStraggler]:
        """Return new stragglers."""
        if now < self._look_at:
            return []
        began = time.thread_time()
        news = self._look(now)
        self._look_at = now + max(LOOK_EVERY_S, (time.thread_time() - began) / COST)
        return news

    def _look(self, now: float) -> list[FoundStraggler]:
        self._window_s = window_of(self._series.values())
        comparison = compare(self._compared(), stage_of=self._stage_of)
        news = self._news_of_ranks(comparison, now)
        if not any(one.is_clear for one in comparison.slow):
            news += self._news_of_links(comparison.waiting, now)
        return news

    # Kept reports.

    def _keep(self, kept: dict[str, deque[Times]], name: str, one: Times | None) -> None:
        if one is None:
            return
        rows = kept.setdefault(name, deque(maxlen=MAX_ROWS))
        rows.append(one)
        begins = one.until - 1.5 * window_of([rows])
        while rows[0].until < begins:
            rows.popleft()

    def _take_links(self, host: str, links: Mapping[str, Any], at_s: float) -> None:
        for address in links.get("from", ()):
            known = self._addresses.setdefault(address, host)
            if known != host:
                self._addresses[address] = ""
        for address, row in mapping(links.get("to")).items():
            peer = self._addresses.get(address, "")
            if address == OTHERS or not peer or peer == host:
                continue
            looks = self._looks.setdefault((host, peer), deque(maxlen=MAX_ROWS))
            looks.append(Look(at_s, links["seconds"], row["wait"], row["out"]))
            while looks[0].until < at_s - 1.2 * self._window_s:
                looks.popleft()

    def _compared(self) -> dict[str, deque[Times]]:
        """Return the rows to compare: of folded ranks the slowest of each host; of an only host the others
        there, too.
        """
        if len(self._series) == 1 and self._rests:
            return {**self._series, "": next(iter(self._rests.values()))}
        return self._series

    def _stage_of(self, rank: int) -> str:
        words = self._place(rank).partition(",")[0]
        return words if words.startswith("stage ") else ""

    def _place(self, rank: int) -> str:
        return self._places.get(rank) or self._place_of(rank)

    # Findings.

    def _news_of_ranks(self, found: RankComparison, now: float) -> list[FoundStraggler]:
        """Return one for each host and cause: of several ranks the slowest."""
        slow = {one.rank for one in found.slow}
        judged = {rank for rank, _ in self._told if rank in found.judged}
        if self._rests:  # then the slowest of its host stands for all
            hosts = {self._host_of.get(rank) for rank in found.judged}
            judged = {rank for rank, _ in self._told if self._host_of.get(rank) in hosts}
        news = self._over({key for key in self._told if key[1] != "link" and key[0] in judged - slow})
        groups: dict[tuple[str, str], list[Slow]] = {}
        for one in found.slow:
            if one.is_clear and (one.rank, one.cause) not in self._told:
                groups.setdefault((self._host_of.get(one.rank, ""), one.cause), []).append(one)
        for (host, cause), group in groups.items():
            told = [self._tell((one.rank, cause), now) for one in group]
            text, share = self._describe(group, host), round(group[0].share, 4)
            news.append(FoundStraggler(group[0].rank, host, cause, share, text, is_said=any(told)))
        return news

    def _news_of_links(self, waiting: float | None, now: float) -> list[FoundStraggler]:
        found = find_slow_link(self._looks, newest=self._newest, length=self._window_s, waiting=waiting)
        rank = None if found is None else self._first_rank(found.host)
        news = self._over({key for key in self._told if key[1] == "link" and key[0] != rank})
        if found is not None and found.is_clear and rank is not None and (rank, "link") not in self._told:
            is_said, share = self._tell((rank, "link"), now), round(found.share, 4)
            news.append(
                FoundStraggler(rank, found.host, "link", share, describe_link(found), is_said=is_said)
            )
        return news

    def _tell(self, key: tuple[int, str], now: float) -> bool:
        """Take it for known from now on. Return whether to print a line about it."""
        self._told.add(key)
        until, quiet_s = self._quiet.get(key, (float("-inf"), QUIET_S / 2))
        if now < until:
            return False
        quiet_s = min(MAX_QUIET_S, 2 * quiet_s)
        self._quiet[key] = (now + quiet_s, quiet_s)
        return True

    def _over(self, keys: Collection[tuple[int, str]]) -> list[FoundStraggler]:
        self._told.difference_update(keys)
        return [
            FoundStraggler(rank, self._host_of.get(rank, ""), cause, is_over=True)
            for rank, cause in sorted(keys)
        ]

    def _first_rank(self, host: str) -> int | None:
        return min((rank for rank, its_host in self._host_of.items() if its_host == host), default=None)

    def _describe(self, group: list[Slow], host: str) -> str:
        one = group[0]
        place = self._place(one.rank)
        who = f"rank {one.rank} on {host}{f' ({place})' if place else ''}"
        if len(group) > 1:
            who += f" and {count(len(group) - 1, 'other rank')} there"
        return describe_slow(one, who, holds="holds" if len(group) == 1 else "hold")


def describe_slow(one: Slow, who: str, *, holds: str = "holds") -> str:
    """Describe it in a sentence."""
    longer = _time(one.own_s - one.others_s)
    head = (
        f"{who} {holds} up the others by {longer} in each step of {_time(one.step_s)}, {_percent(one.share)}"
    )
    times = f"{_time(one.in_cause_s)} a step, others {_time(one.others_in_cause_s)}"
    if one.cause == "data":
        hint = "look at the storage that it reads from, and at the workers of its loader"
        return f"{head}: getting data, or what else it does between steps, takes {times}; {hint}"
    phase = f", most of the difference in {one.phase}" if one.phase else ""
    hint = "look at the load, the clock and the temperature of its processors"
    return f"{head}: it computes for {times}{phase}; {hint}"


def describe_link(one: SlowLink) -> str:
    """Describe it in a sentence."""
    rates = f"{shown_size(round(one.rate))}/s against {shown_size(round(one.others_rate))}/s of others"
    if one.is_path:
        who, where = f"the link from {one.source} to {one.peer}", "the way between them"
    else:
        way = "outgoing" if one.is_outgoing else "incoming"
        who, where = f"the {way} link of {one.host}", "its network card, cable and switch port"
    return (
        f"{who} holds up the job: data from {one.source} to {one.peer} wait {_percent(one.wait)} of the "
        f"time, those of others {_percent(one.others_wait)}, and go at {rates}; look at {where}"
    )


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
