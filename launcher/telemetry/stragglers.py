"""The ranks that the others wait for, by the times that all of them report. Arithmetic only.

A rank's own time in a step is the step without waiting for others, and without pauses to save or evaluate.
Ranks that do the same work are compared: those of one stage of a pipeline, for stages differ by design and
wait for each other. A straggler's own time is greater than the median of the others' by a part of the step,
these wait by as much longer, and computing or getting data explains it. The window is cut into parts, and
this holds in nearly all of them: one long pause makes no straggler. docs/launch/stragglers.md has the limits
of this.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from statistics import median, stdev
from typing import Any, NamedTuple

from ..run_state.metric_table import COMPUTING, DATA, PHASES, WAITING
from ..run_state.series import Spread
from ..run_state.step_times import StepTimes
from ..run_state.values import numbers

WINDOW_S = 20.0  # longer where steps are, so that each part has one
MAX_WINDOW_S = 3600.0
MIN_STEPS = 5
PARTS = 6
MIN_PARTS = 5  # parts in which a straggler is one
ENTER = 0.10  # part of the step, in the whole window
ENTER_PART = 0.05  # the same, in a part of it
LEAVE = 0.05  # with less in the whole window, a straggler is well again
CERTAIN = 3.5  # standard errors by which it takes longer: a few long pauses come together by chance
EXPLAINED = 0.5  # part of the difference, explained by computing or data
SAME_RANK = 0.6  # part of the time, where only the slowest of a host is known
REST = -1  # in place of a rank: the others of a host
_COMPUTING = [name for name, phase in PHASES.items() if phase.kind == COMPUTING]


class Times(NamedTuple):
    """The times of `rank` for so many steps; `until` is on the clock of the comparing process."""

    until: float
    rank: int
    steps: float
    took: StepTimes

    @property
    def own_s(self) -> float:
        return self.took.own_s

    @property
    def step_s(self) -> float:
        return self.took.step_s

    @property
    def waiting_s(self) -> float:
        """Seconds of waiting for others."""
        return self.took.of(WAITING)

    @property
    def data_s(self) -> float:
        return self.took.of(DATA)

    @property
    def computing_s(self) -> float:
        """Seconds of computing; 0: it does not report the phases of its steps."""
        return self.took.of(COMPUTING)


class Slow(NamedTuple):
    """A rank that others wait for.

    `own_s` and `others_s` are its own time in a step, and the median of the others'; `in_cause_s` and
    `others_in_cause_s` the parts of the cause in these.
    """

    rank: int
    cause: str  # "compute" or "data"
    share: float  # part of the step by which its own time exceeds the others'
    step_s: float
    own_s: float
    others_s: float
    in_cause_s: float
    others_in_cause_s: float
    is_clear: bool  # it is a straggler; if not, it may still be one that has not become well
    phase: str = ""  # the phase of computing that takes most: "forward", "backward" or "optimizer"


def times_of(until: float, rank: int, row: Mapping[str, Any]) -> Times | None:
    """Return a rank's times, if the report is about steps alone."""
    return None if row.get("state") else _times(until, rank, numbers(row))


def folded_times_of(until: float, row: Mapping[str, Any]) -> Times | None:
    """Return the times of the slowest rank of a host: of folded ranks only least, mean and greatest are
    known.
    """
    columns = _columns(row)
    own = columns.get("own_s")
    if own is None or not own.high_key:
        return None
    slowest = own.high_key
    known = {
        name: one.high if one.high_key == slowest else one.low if one.low_key == slowest else one.mean
        for name, one in columns.items()
    }
    own_s = own.high + known.get("paused_s", 0.0)
    known["comm_s"] = max(0.0, known.get("step_s", 0.0) - own_s)
    return _times(until, int(slowest), known)


def folded_rest_of(until: float, row: Mapping[str, Any]) -> Times | None:
    """Return a host's mean times, to compare its slowest rank with if there is no other host."""
    known = {name: one.mean for name, one in _columns(row).items()}
    return _times(until, REST, known) if "own_s" in known else None


def _columns(row: Mapping[str, Any]) -> dict[str, Spread]:
    found = ((name, Spread.of("", value)) for name, value in row.items() if isinstance(value, list))
    return {name: one for name, one in found if one is not None}


def _times(until: float, rank: int, row: Mapping[str, float]) -> Times | None:
    """Return the times; None without steps, or without the rank's waits in them."""
    steps, step_s, comm_s = row.get("steps", 0.0), row.get("step_s", 0.0), row.get("comm_s", -1.0)
    if not steps > 0 or not 0 < step_s < inf or not 0 <= comm_s < inf:
        return None
    return Times(until, rank, steps, StepTimes.of_row({**row, "comm_s": min(comm_s, step_s)}))


def window_of(series: Iterable[Sequence[Times]]) -> float:
    """Return the seconds to look at: longer where ranks report a step more rarely."""
    spacings = [_spacing(rows) for rows in series if rows]
    return max(WINDOW_S, 1.2 * PARTS * median(spacings)) if spacings else WINDOW_S


def _spacing(rows: Sequence[Times]) -> float:
    """Return the seconds from one row to the next, lately."""
    num = min(len(rows), PARTS)
    if num == 1:
        return rows[-1].step_s / rows[-1].steps
    return (rows[-1].until - rows[-num].until) / (num - 1)


class RankComparison(NamedTuple):
    """Ranks compared with each other."""

    slow: list[Slow]  # ranks that others wait for, the slowest first, and those that are near it
    judged: frozenset[int]  # ranks that were compared with others
    # the part of a step in which the median of the ranks waits; None: no rank reports it
    waiting: float | None


def compare(
    series: Mapping[str, Sequence[Times]], *, stage_of: Callable[[int], str] = lambda rank: ""
) -> RankComparison:
    """Compare ranks, each with those that do the same.

    `series`: reports of each rank, or of the slowest rank of each host, oldest first. `stage_of`: ranks of
    equal stages do the same work.
    """
    length = window_of(series.values())
    newest = max((rows[-1].until for rows in series.values() if rows), default=0.0)
    found = [_rank_in(rows, newest=newest, length=length) for rows in series.values()]
    ranks = [] if length > MAX_WINDOW_S else [one for one in found if one is not None]
    groups: dict[str, list[_Rank]] = {}
    for rank in ranks:
        groups.setdefault(stage_of(rank.mean.rank), []).append(rank)
    slow: list[Slow] = []
    judged: set[int] = set()
    for group in groups.values():
        if len(group) > 1:
            judged.update(one.mean.rank for one in group)
            slow += _slow_in(group)
    waiting = [one.mean.waiting_s / one.mean.step_s for one in ranks]
    return RankComparison(
        slow=sorted(slow, key=lambda one: (-one.share, one.rank)),
        judged=frozenset(judged - {REST}),
        waiting=median(waiting) if waiting else None,
    )


class _Rank(NamedTuple):
    """The means of the parts of a window, None for empty ones, and of the whole.

    `error`: the standard error of the part of the time that is its own. `is_one`: most of it is about one
    rank.
    """

    parts: list[Times | None]
    mean: Times
    error: float
    is_one: bool


def _rank_in(rows: Sequence[Times], *, newest: float, length: float) -> _Rank | None:
    """Return the means; None if too little of the window is known."""
    within = [one for one in rows if newest - length < one.until <= newest]
    num_steps = sum(one.steps for one in within)
    if num_steps < MIN_STEPS:
        return None
    rank, steps = max(_steps_by_rank(within).items(), key=lambda item: item[1])
    of_part: list[list[Times]] = [[] for _ in range(PARTS)]
    for one in within:
        of_part[min(PARTS - 1, int(PARTS * (newest - one.until) / length))].append(one)
    parts = [_sum(chosen, rank) if chosen else None for chosen in of_part]
    if sum(part is not None for part in parts) < MIN_PARTS:
        return None
    spread = stdev(one.own_s / one.step_s for one in within) if len(within) > 1 else 0.0
    return _Rank(parts, _sum(within, rank), spread / len(within) ** 0.5, steps >= SAME_RANK * num_steps)


def _steps_by_rank(rows: Iterable[Times]) -> dict[int, float]:
    found: dict[int, float] = {}
    for one in rows:
        found[one.rank] = found.get(one.rank, 0) + one.steps
    return found


def _sum(rows: Sequence[Times], rank: int) -> Times:
    """Return the times of one step."""
    took = StepTimes.mean([one.took for one in rows], sum(one.steps for one in rows))
    return Times(rows[-1].until, rank, 1.0, took or rows[-1].took)


def _slow_in(group: Sequence[_Rank]) -> list[Slow]:
    """Return the slow ranks of some that do the same."""
    own_s = sorted(one.mean.own_s for one in group)
    waiting_s = sorted(one.mean.waiting_s for one in group)
    found = []
    for one in group:
        longer_s = one.mean.own_s - _median_of_others(own_s, one.mean.own_s)
        share = longer_s / one.mean.step_s
        others_wait_s = _median_of_others(waiting_s, one.mean.waiting_s) - one.mean.waiting_s
        if not one.is_one or one.mean.rank == REST or share < LEAVE or others_wait_s < EXPLAINED * longer_s:
            continue
        others = [other for other in group if other is not one]
        error = (one.error**2 + median(other.error for other in others) ** 2) ** 0.5
        is_certain = share >= CERTAIN * error and _num_slow_parts(one, others) >= MIN_PARTS
        is_clear = share >= ENTER and is_certain
        slow = _explain(one.mean, [other.mean for other in others], is_clear=is_clear)
        if slow is not None:
            found.append(slow)
    return found


def _num_slow_parts(one: _Rank, others: Sequence[_Rank]) -> int:
    """Return the number of parts of the window in which the others wait for it."""
    num = 0
    for place, part in enumerate(one.parts):
        known = [other.own_s for rank in others if (other := rank.parts[place]) is not None]
        if part is not None and known:
            num += part.own_s - median(known) >= ENTER_PART * part.step_s
    return num


def _median_of_others(known: Sequence[float], own: float) -> float:
    """Return the median without one value, of values in order."""
    place = bisect_left(known, own)
    middle = (len(known) - 2) / 2
    pair = (int(middle), int(middle + 0.5))
    return sum(known[at + (at >= place)] for at in pair) / 2


def _explain(one: Times, others: Sequence[Times], *, is_clear: bool) -> Slow | None:
    """Explain its long own time; None if the cause is neither computing nor data."""
    others_s = median(other.own_s for other in others)
    longer_s = one.own_s - others_s
    others_data_s = median(other.data_s for other in others)
    data_longer_s = one.data_s - others_data_s
    known = Slow(
        rank=one.rank,
        cause="data",
        share=longer_s / one.step_s,
        step_s=one.step_s,
        own_s=one.own_s,
        others_s=others_s,
        is_clear=is_clear,
        in_cause_s=one.data_s,
        others_in_cause_s=others_data_s,
    )
    computing = [other.computing_s for other in others if other.computing_s]
    if not one.computing_s or not computing:
        if data_longer_s >= EXPLAINED * longer_s:
            return known
        return known._replace(
            cause="compute",
            in_cause_s=one.own_s - one.data_s,
            others_in_cause_s=median(other.own_s - other.data_s for other in others),
        )
    others_computing_s = median(computing)
    computing_longer_s = one.computing_s - others_computing_s
    if computing_longer_s + data_longer_s < EXPLAINED * longer_s:
        return None
    if data_longer_s >= computing_longer_s:
        return known
    growth = {
        name: one.took.seconds(name) - median(other.took.seconds(name) for other in others)
        for name in _COMPUTING
    }
    phase = max(growth, key=lambda name: growth[name])
    return known._replace(
        cause="compute",
        in_cause_s=one.computing_s,
        others_in_cause_s=others_computing_s,
        phase=phase if growth[phase] >= EXPLAINED * computing_longer_s else "",
    )
