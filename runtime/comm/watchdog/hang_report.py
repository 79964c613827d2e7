"""Report of a hang for the person who looks for its cause: text made of the ranks' positions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from ....shared.table import table
from ..flight_recorder import (
    JOB_LANE,
    MESSAGE_LANES,
    NUM_LANES,
    RECEIVE_LANE,
    SEND_LANE,
    Collective,
    Stream,
)
from ..rank_names import RankNames, folded
from .position import Position, Wait

_SHOWN_STACKS = 4
_SHOWN_HOSTS = 3
_SILENT = "ended, stopped, or in code that keeps Python's lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stuck:
    """The first collective, or message, that does not come to its end."""

    label: Collective
    s: float  # seconds of waiting
    came: tuple[int, ...]  # ranks
    missing: tuple[int, ...]  # ranks that answer, but have not begun it
    silent: tuple[int, ...]  # ranks that do not answer


def describe_hang(
    positions: Mapping[int, Position],
    *,
    world_size: int,
    leaders: Sequence[int] | None = None,
    names: RankNames | None = None,
) -> str | None:
    """Say which rank keeps which waiting, rank by rank; None if no rank waits.

    `positions` are by rank; ranks that have not answered have none. `leaders` are, too: ranks with the same
    one have the same model, and do the same collectives. `names` are what the ranks are called.
    """
    leaders, names = leaders or (0,) * world_size, names or RankNames()
    positions = _without_idle_messages(positions)
    stuck = _find_stuck(positions, leaders)
    if stuck is None:
        return None
    lines = [f"it hangs: {_cause(stuck, positions, leaders, names)}"]
    rows = _rows(positions, stuck)
    lines += _table(rows, names)
    for ranks, *_ in _shown_stacks(rows, positions, stuck):
        position = positions[ranks[0]]
        where = ", ".join(filter(None, (names.place([position.rank]), position.host)))
        lines.append(f"rank {position.rank} ({where}, pid {position.pid}), most recent call last:")
        lines += [f"    {frame}" for frame in position.stack or ("no Python is running",)]
    return "".join(f"dslaunch: {line}\n" for line in lines)


def _without_idle_messages(positions: Mapping[int, Position]) -> Mapping[int, Position]:
    """Drop messages that no program stands still for: a receive that was begun ahead of its use, or a send,
    of which gloo does not tell whether it has come to its end. They count only where nothing else is
    waited for: NCCL makes a stream wait, and not the program.
    """
    kept = {
        rank: replace(
            one,
            waits=tuple(
                wait for wait in one.waits if wait.is_awaited or wait.label.lane not in MESSAGE_LANES
            ),
        )
        for rank, one in positions.items()
    }
    return kept if any(one.waits for one in kept.values()) else positions


def _find_stuck(positions: Mapping[int, Position], leaders: Sequence[int]) -> _Stuck | None:
    stuck = _longest(positions, leaders, among=positions.keys())
    seen: set[Collective] = set()
    while stuck is not None and stuck.label not in seen:
        # A missing rank may wait in turn, among other ranks: that is nearer to the cause.
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
    _, waiting, longest = max(waits, key=itemgetter(0))
    together = longest.ranks or [
        rank for rank, leader in enumerate(leaders) if longest.lane == JOB_LANE or leader == leaders[waiting]
    ]
    here = {rank: positions[rank] for rank in together if rank in positions}
    of_line = [
        wait for position in here.values() for wait in position.waits if _is_in_line(wait.label, longest)
    ]
    first = min(of_line, key=lambda wait: (wait.label.turn, wait.label.number))
    came = tuple(rank for rank, one in here.items() if one.has_begun(first.label))
    return _Stuck(
        label=first.label,
        s=max(wait.s for wait in of_line),
        came=came,
        missing=tuple(sorted(here.keys() - set(came))),
        silent=tuple(sorted(set(together) - here.keys())),
    )


def _is_in_line(one: Collective, other: Collective) -> bool:
    """True if the same ranks do both, one after the other."""
    if one.ranks:
        return (one.axis, one.ranks) == (other.axis, other.ranks)
    return one.lane == other.lane and not other.ranks


# ---- the first line


def _cause(stuck: _Stuck, positions: Mapping[int, Position], leaders: Sequence[int], names: RankNames) -> str:
    paths = different_paths(positions, leaders, names)
    if paths:
        return paths
    label, came = stuck.label, f"{names.of(*stuck.came)} {_have(stuck.came)}"
    is_send, is_receive = label.lane == SEND_LANE, label.lane == RECEIVE_LANE
    what = f"{label.what if is_receive else label} (step {label.step})"
    if stuck.missing:
        not_done = "come to"
        if is_send or is_receive:
            not_done = "begun to receive" if is_send else "sent"
            what = f"{label.what} (step {label.step})"
        waited = f"for which {came} waited {stuck.s:.0f} s"
        if is_send:
            waited = f"which {came} been sending for {stuck.s:.0f} s"
        late = f"{names.of(*stuck.missing)} {_have(stuck.missing)}"
        return f"{late} not {not_done} {what}, {waited}; {_excuses(stuck, positions, names)}"
    if stuck.silent:
        before = next(
            (
                f"; the last that {names.of(*stuck.silent)} can have taken part in is {one} (step {one.step})"
                for one in reversed(positions[stuck.came[0]].recent)
                if _is_in_line(one, label) and (one.turn, one.number) < (label.turn, label.number)
            ),
            "",
        )
        silent = _unanswered(stuck.silent, names)
        return f"{silent}, while {came} waited {stuck.s:.0f} s for {what}{before}"
    just_came = {
        rank: wait.s
        for rank in stuck.came
        for wait in positions[rank].waits
        if wait.label == label and wait.s < stuck.s / 10
    }
    # These came after they were asked, as out of code that kept Python's lock.
    if just_came and not (is_send or is_receive):
        others = [rank for rank in stuck.came if rank not in just_came]
        return (
            f"{names.of(*just_came)} came to {what} only {max(just_came.values()):.0f} s ago, for which "
            f"{names.of(*others)} {_have(others)} waited {stuck.s:.0f} s"
        )
    return (
        f"{_all(stuck, leaders, names)} {_have(stuck.came)} come to {label} (step {label.step}), and it has "
        f"not ended for {stuck.s:.0f} s: the network or a device is stuck"
    )


def different_paths(positions: Mapping[int, Position], leaders: Sequence[int], names: RankNames) -> str:
    """Name the first collective, as far as the ranks remember, in which ranks that do the same differed, and
    where in its program each of them is; "" if there is none.
    """
    everyone = tuple(range(len(leaders)))
    peers = {rank: tuple(one for one in everyone if leaders[one] == leaders[rank]) for rank in positions}
    for lane in range(NUM_LANES):
        seen: dict[tuple[int, Stream], dict[tuple[str, str, int], list[tuple[int, Collective]]]] = {}
        for rank, position in sorted(positions.items()):
            for collective in position.recent:
                if collective.lane == lane:
                    stream = collective.stream(everyone if lane == JOB_LANE else peers[rank])
                    known = seen.setdefault((collective.place, stream), {})
                    known.setdefault(collective.identity, []).append((rank, collective))
        for _, by_identity in sorted(seen.items()):
            if len(by_identity) > 1:
                sides = sorted(by_identity.values(), key=len, reverse=True)
                came = " where ".join(
                    f"{names.of(*(rank for rank, _ in side))} came to {side[0][1]}" for side in sides
                )
                return f"{came} (step {sides[0][0][1].step}): the ranks took different paths"
    return ""


def _excuses(stuck: _Stuck, positions: Mapping[int, Position], names: RankNames) -> str:
    """Describe what the missing ranks do instead."""
    doing: dict[str, list[int]] = defaultdict(list)
    for rank in stuck.missing:
        doing[_doing(positions[rank])].append(rank)
    clauses = [text if len(doing) == 1 else f"{names.of(*ranks)}: {text}" for text, ranks in doing.items()]
    if stuck.silent:
        clauses.append(_unanswered(stuck.silent, names))
    elif all(
        _awaited(positions[rank]) or positions[rank].elsewhere for rank in stuck.missing
    ):  # otherwise they may wait for the others
        clauses.append("the ranks took different paths")
    return "; ".join(clauses)


def _doing(position: Position) -> str:
    awaited = _awaited(position)
    if awaited:
        return f"waiting for {awaited[0].label}"
    if position.elsewhere:
        return f"waiting for {position.elsewhere}"
    last = f"after {position.recent[-1]}" if position.recent else "before any collective"
    return f"in its own code for {position.quiet_s:.0f} s, {last}"


def _unanswered(silent: Sequence[int], names: RankNames) -> str:
    return f"{names.of(*silent)} {'does' if len(silent) == 1 else 'do'} not answer ({_SILENT})"


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
    """Describe what the rank does, and the number of its collective."""
    awaited = _awaited(position)
    if awaited:
        return f"waits for {awaited[0].label}", str(awaited[0].label.number)
    if position.waits:  # on a GPU this is how waiting looks from here
        return f"has begun {position.waits[0].label}", str(position.waits[0].label.number)
    if position.elsewhere:
        return f"waits for {position.elsewhere}", "-"
    if position.recent:
        return f"own code, after {position.recent[-1]}", "-"
    return "own code", "-"


def _since_s(position: Position) -> float:
    waits = _awaited(position) or position.waits
    return waits[0].s if waits else position.quiet_s


def _awaited(position: Position) -> tuple[Wait, ...]:
    return tuple(wait for wait in position.waits if wait.is_awaited)


def _table(rows: Sequence[_Row], names: RankNames) -> list[str]:
    head = ("ranks", "host", "step", "what it does", "number", "for")
    cells = [(folded(row[0]), *row[1:]) for row in rows]
    if not names.has_places:
        return [f"  {line}" for line in table(cells, head=head, numbers=(2, 4, 5))]
    placed = [
        (ranks, names.place(row[0]) or "several", *rest)
        for row, (ranks, *rest) in zip(rows, cells, strict=True)
    ]
    return [f"  {line}" for line in table(placed, head=("ranks", "place", *head[1:]), numbers=(3, 5, 6))]


def _shown_stacks(rows: Sequence[_Row], positions: Mapping[int, Position], stuck: _Stuck) -> Sequence[_Row]:
    """The rows whose stacks are shown, in the order of ranks; those that are waited for are among them."""
    answered = [row for row in rows if row[0][0] in positions]
    first = sorted(answered, key=lambda row: not set(row[0]) & set(stuck.missing))[:_SHOWN_STACKS]
    return sorted(first, key=lambda row: row[0][0])


# ---- words


def _all(stuck: _Stuck, leaders: Sequence[int], names: RankNames) -> str:
    return "all ranks" if len(stuck.came) == len(leaders) else names.of(*stuck.came)


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
