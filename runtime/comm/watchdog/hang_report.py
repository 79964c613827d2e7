"""What a hang looks like to who has to find its cause: text made of the ranks' positions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from ...table import table
from ..flight_recorder import JOB_LANE, NUM_LANES, Collective
from .position import Position, Wait

_SHOWN_STACKS = 4
_SHOWN_HOSTS = 3
_SILENT = "ended, stopped, or in code that keeps Python's lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stuck:
    """The first collective that does not come to its end."""

    label: Collective
    s: float  # that it has been waited for
    came: tuple[int, ...]  # ranks
    missing: tuple[int, ...]  # ranks that answer, but have not begun it
    silent: tuple[int, ...]  # ranks that do not answer


def describe_hang(
    positions: Mapping[int, Position], *, world_size: int, leaders: Sequence[int] | None = None
) -> str | None:
    """Say which rank keeps which waiting, rank by rank; None if no rank waits.

    `positions` are by rank; ranks that have not answered have none. `leaders` are, too: ranks with the same
    one have the same model, and do the same collectives.
    """
    leaders = leaders or (0,) * world_size
    stuck = _find_stuck(positions, leaders)
    if stuck is None:
        return None
    lines = [f"it hangs: {_cause(stuck, positions, leaders)}"]
    rows = _rows(positions, stuck)
    lines += _table(rows)
    for ranks, *_ in [row for row in rows if row[0][0] in positions][:_SHOWN_STACKS]:
        position = positions[ranks[0]]
        lines.append(f"rank {position.rank} ({position.host}, pid {position.pid}), most recent call last:")
        lines += [f"    {frame}" for frame in position.stack or ("no Python is running",)]
    return "".join(f"dslaunch: {line}\n" for line in lines)


def _find_stuck(positions: Mapping[int, Position], leaders: Sequence[int]) -> _Stuck | None:
    stuck = _longest(positions, leaders, among=positions.keys())
    seen: set[Collective] = set()
    while stuck is not None and stuck.label not in seen:
        # Who has not come may wait in turn, among other ranks: that is nearer to the cause.
        seen.add(stuck.label)
        held_up = [rank for rank in stuck.missing if _waits_elsewhere(positions[rank], stuck.label)]
        stuck = _longest(positions, leaders, among=held_up) or stuck
    return stuck


def _waits_elsewhere(position: Position, label: Collective) -> bool:
    return any(label.lane == JOB_LANE or wait.label.ranks != label.ranks for wait in _awaited(position))


def _longest(
    positions: Mapping[int, Position], leaders: Sequence[int], *, among: Collection[int]
) -> _Stuck | None:
    """The collective that has been waited for longest, by one of these ranks, and all who should come."""
    waits = [(wait.s, rank, wait.label) for rank in among for wait in positions[rank].waits]
    if not waits:
        return None
    _, waiting, (lane, *_, ranks) = max(waits, key=itemgetter(0))
    together = ranks or [
        rank for rank, leader in enumerate(leaders) if lane == JOB_LANE or leader == leaders[waiting]
    ]
    here = {rank: positions[rank] for rank in together if rank in positions}
    of_lane = [
        wait
        for position in here.values()
        for wait in position.waits
        if wait.label.lane == lane and wait.label.ranks == ranks
    ]
    first = min(of_lane, key=lambda wait: wait.label.number)
    came = tuple(rank for rank, one in here.items() if one.issued[lane] >= first.label.number)
    return _Stuck(
        label=first.label,
        s=max(wait.s for wait in of_lane),
        came=came,
        missing=tuple(sorted(here.keys() - set(came))),
        silent=tuple(sorted(set(together) - here.keys())),
    )


# ---- the first line


def _cause(stuck: _Stuck, positions: Mapping[int, Position], leaders: Sequence[int]) -> str:
    paths = _different_paths(positions, leaders)
    if paths:
        return paths
    what = f"{stuck.label} (step {stuck.label.step})"
    waited = f"{_ranks(stuck.came)} {_have(stuck.came)} waited {stuck.s:.0f} s"
    if stuck.missing:
        return (
            f"{_ranks(stuck.missing)} {_have(stuck.missing)} not come to {what}, for which {waited}; "
            + _excuses(stuck, positions)
        )
    if stuck.silent:
        before = next(
            (
                f"; the last that {_ranks(stuck.silent)} can have taken part in is {one} (step {one.step})"
                for one in reversed(positions[stuck.came[0]].recent)
                if one.lane == stuck.label.lane and one.number < stuck.label.number
            ),
            "",
        )
        return f"{_unanswered(stuck.silent)}, while {waited} for {what}{before}"
    return (
        f"{_all(stuck, leaders)} {_have(stuck.came)} come to {what}, and it has not ended for "
        f"{stuck.s:.0f} s: the network or a device is stuck"
    )


def _different_paths(positions: Mapping[int, Position], leaders: Sequence[int]) -> str:
    """The first collective, as far as the ranks remember, in which ranks with one model differed."""
    for lane in range(NUM_LANES):
        seen: dict[tuple[int, int], dict[tuple[str, str, int], list[tuple[int, Collective]]]] = {}
        for rank, position in sorted(positions.items()):
            together = 0 if lane == JOB_LANE else leaders[rank]
            for one in position.recent:
                if one.lane == lane:
                    known = seen.setdefault((one.number, together), {})
                    known.setdefault(one.identity, []).append((rank, one))
        for _, by_identity in sorted(seen.items()):
            if len(by_identity) > 1:
                sides = sorted(by_identity.values(), key=len, reverse=True)
                came = " where ".join(
                    f"{_ranks([rank for rank, _ in side])} came to {side[0][1]}" for side in sides
                )
                return f"{came} (step {sides[0][0][1].step}): the ranks took different paths"
    return ""


def _excuses(stuck: _Stuck, positions: Mapping[int, Position]) -> str:
    """What those do instead who have not come."""
    doing: dict[str, list[int]] = defaultdict(list)
    for rank in stuck.missing:
        doing[_doing(positions[rank])].append(rank)
    clauses = [text if len(doing) == 1 else f"{_ranks(ranks)}: {text}" for text, ranks in doing.items()]
    if stuck.silent:
        clauses.append(_unanswered(stuck.silent))
    elif all(_awaited(positions[rank]) for rank in stuck.missing):  # else they may wait for the others
        clauses.append("the ranks took different paths")
    return "; ".join(clauses)


def _doing(position: Position) -> str:
    awaited = _awaited(position)
    if awaited:
        return f"waiting for {awaited[0].label}"
    last = f"after {position.recent[-1]}" if position.recent else "before any collective"
    return f"in its own code for {position.quiet_s:.0f} s, {last}"


def _unanswered(silent: Sequence[int]) -> str:
    return f"{_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer ({_SILENT})"


# ---- the table


_Row = tuple[list[int], str, str, str, str, str]


def _rows(positions: Mapping[int, Position], stuck: _Stuck) -> list[_Row]:
    """Ranks with the same position in one row: ranks, hosts, step, what, number, since when."""
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, position in sorted(positions.items()):
        groups[(str(position.step), *_state(position))].append(rank)
    rows: list[_Row] = []
    for (step, state, number), ranks in groups.items():
        hosts = list(dict.fromkeys(positions[rank].host for rank in ranks))
        more = f" and {len(hosts) - _SHOWN_HOSTS} more" if len(hosts) > _SHOWN_HOSTS else ""
        since_s = max(_since_s(positions[rank]) for rank in ranks)
        rows.append((ranks, ",".join(hosts[:_SHOWN_HOSTS]) + more, step, state, number, f"{since_s:.0f} s"))
    if stuck.silent:
        rows.append((list(stuck.silent), "?", "?", "does not answer", "?", "?"))
    return sorted(rows, key=lambda row: row[0][0])


def _state(position: Position) -> tuple[str, str]:
    """What it does, and the number of the collective."""
    awaited = _awaited(position)
    if awaited:
        return f"waits for {awaited[0].label}", str(awaited[0].label.number)
    if position.waits:  # on a GPU this is how waiting looks from here
        return f"has begun {position.waits[0].label}", str(position.waits[0].label.number)
    if position.recent:
        return f"own code, after {position.recent[-1]}", "-"
    return "own code", "-"


def _since_s(position: Position) -> float:
    waits = _awaited(position) or position.waits
    return waits[0].s if waits else position.quiet_s


def _awaited(position: Position) -> tuple[Wait, ...]:
    return tuple(wait for wait in position.waits if wait.is_awaited)


def _table(rows: Sequence[_Row]) -> list[str]:
    head = ("ranks", "host", "step", "what it does", "number", "for")
    cells = [(_folded(row[0]), *row[1:]) for row in rows]
    return [f"  {line}" for line in table(cells, head=head, numbers=(2, 4, 5))]


# ---- words


def _folded(ranks: Iterable[int]) -> str:
    """As "0-2,5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_folded(ranks)}"


def _all(stuck: _Stuck, leaders: Sequence[int]) -> str:
    return "all ranks" if len(stuck.came) == len(leaders) else _ranks(stuck.came)


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
