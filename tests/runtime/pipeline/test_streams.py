"""No order of messages stands still on NCCL, whose groups each have one stream on a rank.

On a stream what was issued first runs first, and a message larger than NCCL's buffers ends on both sides
together. So a rank that sends to one neighbour may hold up what another one waits for, where both messages
have the same group. This plays the streams of all ranks, for the tables and in the order in which the
executor issues messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.pipeline.executor import _incoming
from dslaunch.runtime.pipeline.neighbours import edges_of
from dslaunch.runtime.pipeline.schedule import (
    NAMES,
    Action,
    Kind,
    Shape,
    Table,
    forward_table,
    make_table,
    shape_of,
)

Pair = tuple[int, int]  # who sends, and who receives
GroupOf = Callable[[Pair], object]


class Op(NamedTuple):
    """A message on one rank's stream of a group. It begins when all that the rank had computed, or waited
    for, before it was issued is over.
    """

    message: tuple[Pair, object]
    after: int  # so many entries of what the rank computes


class Issued:
    """What one rank computes and waits for, in order, and its messages in the order of their issue; as
    Executor does it in a batch after the first.
    """

    def __init__(self, table: Table, shape: Shape, rank: int) -> None:
        self.computed: list[object] = []  # a message that is waited for, or None: an action
        self.ops: list[Op] = []
        self._shape, self._rank = shape, rank
        self._due = _incoming(table, rank, shape)
        self._here: set[object] = set()  # messages whose receiving has begun
        self._live: set[tuple[int, int]] = set()
        row = table[rank]
        for action, following in zip(row, (*row[1:], None), strict=True):
            self._receive(action, following)
            self.computed.append(None)
            self._send(action)

    def _receive(self, action: Action, following: Action | None) -> None:
        wanted = self._needed(action)
        if wanted is not None:
            source, message = wanted
            while message not in self._here:
                self._fetch(source)
            self.computed.append(((source, self._rank), message))
        ahead = None if following is None else self._needed(following)
        if ahead is not None:
            source, message = ahead
            while message in map(tuple, self._due[source]) and self._is_known(self._due[source][0]):
                self._fetch(source)

    def _send(self, action: Action) -> None:
        kind, stage, number = action
        if kind is Kind.FORWARD:
            self._live.add((stage, number))
        elif kind is not Kind.INPUTS:
            self._live.discard((stage, number))
        place = self._other(action, stage + 1 if kind is Kind.FORWARD else stage - 1)
        if place is not None:
            message = (kind is not Kind.FORWARD, stage, number)
            self.ops.append(Op(((self._rank, place), message), len(self.computed)))

    def _needed(self, action: Action) -> tuple[int, object] | None:
        kind, stage, number = action
        other = stage - 1 if kind is Kind.FORWARD else stage + 1
        place = self._other(action, other)
        return None if place is None else (place, (kind is not Kind.FORWARD, other, number))

    def _other(self, action: Action, stage: int) -> int | None:
        """Return the rank of that stage, if an action's message goes to it, or comes from it."""
        if action.kind is Kind.WEIGHTS or not 0 <= stage < self._shape.num_stages:
            return None
        place = self._shape.owner(stage)
        return None if place == self._rank else place

    def _is_known(self, message: Sequence[Any]) -> bool:
        is_gradient, stage, number = message
        return not is_gradient or (stage - 1, number) in self._live

    def _fetch(self, source: int) -> None:
        message = tuple(self._due[source].popleft())
        self._here.add(message)
        self.ops.append(Op(((source, self._rank), message), len(self.computed)))


class Streams:
    """Of all ranks, and how far each has come."""

    def __init__(self, ranks: Sequence[Issued], group_of: GroupOf) -> None:
        self._computed = [one.computed for one in ranks]
        self._places = [0] * len(ranks)
        self._done: set[object] = {None}
        self._streams: list[list[list[Op]]] = []
        for one in ranks:
            by_group: dict[object, list[Op]] = {}
            for op in reversed(one.ops):
                by_group.setdefault(group_of(op.message[0]), []).append(op)
            self._streams.append([*by_group.values()])

    def stand_still(self) -> bool:
        """Play them until nothing moves; return whether something is left."""
        while self._compute() or self._send():
            pass
        lengths = [len(one) for one in self._computed]
        return any(map(any, self._streams)) or self._places != lengths

    def _compute(self) -> bool:
        before = sum(self._places)
        for rank, entries in enumerate(self._computed):
            while self._places[rank] < len(entries) and entries[self._places[rank]] in self._done:
                self._places[rank] += 1
        return sum(self._places) > before

    def _send(self) -> bool:
        """End the messages that are first on both sides' streams."""
        first: dict[object, list[list[Op]]] = {}
        for place, streams in zip(self._places, self._streams, strict=True):
            for stream in streams:
                if stream and stream[-1].after <= place:
                    first.setdefault(stream[-1].message, []).append(stream)
        met = {message: both for message, both in first.items() if len(both) == 2}
        for both in met.values():
            for stream in both:
                stream.pop()
        self._done |= met.keys()
        return bool(met)


def cases(*sizes: int) -> Iterator[tuple[Shape, Table]]:
    """Tables of every schedule for these numbers of ranks."""
    for schedule in NAMES:
        for num_ranks in sizes:
            for per_rank in (1, 2, 3):
                for number in sorted({1, 2, num_ranks, 2 * num_ranks, 3 * num_ranks}):
                    try:
                        shape = shape_of(schedule, num_ranks=num_ranks, per_rank=per_rank)
                        yield shape, make_table(shape, number)
                        yield shape, forward_table(shape, number)
                    except ConfigError:
                        continue


def of_one_direction(pair: Pair) -> object:
    """All messages to later ranks in one group, and those to earlier ones in another."""
    return pair[0] < pair[1]


def of_a_pair(pair: Pair) -> object:
    return pair


def _issued(table: Table, shape: Shape) -> list[Issued]:
    return [Issued(table, shape, rank) for rank in range(shape.num_ranks)]


def test_no_schedule_stands_still_with_groups_for_each_two_neighbours() -> None:
    for shape, table in cases(2, 3, 4, 6):
        issued = _issued(table, shape)
        assert not Streams(issued, of_a_pair).stand_still(), (shape, len(table[0]))
        pairs = {tuple(sorted(op.message[0])) for one in issued for op in one.ops}
        assert pairs <= {*edges_of(shape)}, shape


def test_with_a_group_for_each_direction_some_would() -> None:
    found = {
        (shape.schedule, shape.num_ranks)
        for shape, table in cases(3, 4)
        if Streams(_issued(table, shape), of_one_direction).stand_still()
    }
    assert {("zero_bubble", 3), ("zbv", 4)} <= found
    assert not any(schedule in ("1f1b", "gpipe") for schedule, _ in found)
