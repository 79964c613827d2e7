"""Finds ranks that wait for each other's messages without end.

A host that has waited for a while tells the others, in the store of all ranks, what it waits for and which
messages it has issued. It issues no more while it waits, so that what all such hosts have told can be
played to its end.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

_VERDICT = "standstill"  # for ranks that wait for one that has failed with it


class Message(NamedTuple):
    """One side of it."""

    is_send: bool
    peer: int  # the rank at its other side
    number: int  # from 1, among those of one group that go from one of the two ranks to the other
    num_bytes: int

    def __str__(self) -> str:
        what = "sends rank" if self.is_send else "receives from rank"
        return f"{what} {self.peer} {self.num_bytes} bytes, message {self.number} between the two"

    def is_other_side_of(self, other: Message, rank: int) -> bool:
        """Whether they are one message: this is what `other.peer` does, and `other` what `rank` does."""
        return (self.is_send, self.peer, self.number) == (not other.is_send, rank, other.number)


Unit = Sequence[Message]  # what runs together


class Issued(NamedTuple):
    """What a rank has issued to one stream of a group."""

    num_over: int  # units
    last_over: list[tuple[bool, int, int]]  # by kind and peer, the number of the last message
    left: list[list[Message]]  # units
    eager_bytes: int  # a send of no more ends at once

    @classmethod
    def of(cls, read: Sequence[Any]) -> Issued:
        """Undo what JSON does."""
        num_over, last_over, left, eager_bytes = read
        return cls(num_over, last_over, [[Message(*one) for one in unit] for unit in left], eager_bytes)


class Waiting(NamedTuple):
    """A rank whose host waits."""

    stream: str
    place: int  # of the unit, in the order of issue
    issued: dict[str, Issued]  # by stream


class Board:
    """What hosts that wait tell the others."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self._store = dist.PrefixStore("fake nccl", store)
        self.rank, self.size = rank, size
        self.streams: list[Any] = []  # of this rank, with messages or barriers
        self._number = 0

    @contextmanager
    def told(self, stream: str, place: int) -> Iterator[None]:
        """Inside, the others know that this rank's host waits for that unit of a stream."""
        self._tell(Waiting(stream, place, {one.name: one.issued() for one in self.streams}))
        try:
            yield
        finally:
            self._tell(None)

    def standstill(self) -> str | None:
        """Return which messages wait for each other, if the wait of this rank has no end whatever hosts do
        that do not wait.
        """
        if self._store.check([_VERDICT]):
            return str(self._store.get(_VERDICT).decode())
        told = self._read()
        found = Play({rank: waiting for rank, (_, waiting) in told.items()}).cycle(self.rank)
        if not found or self._read() != told:  # a host that went on meanwhile may have issued more
            return None
        verdict = "ranks wait for each other's messages without end: " + "; ".join(found)
        self._store.set(_VERDICT, verdict)
        return verdict

    def _tell(self, waiting: Waiting | None) -> None:
        self._number += 1
        self._store.set(f"rank {self.rank}", json.dumps((self._number, waiting)))

    def _read(self) -> dict[int, tuple[int, Waiting]]:
        found = {}
        for rank in range(self.size):
            if self._store.check([f"rank {rank}"]):
                number, waiting = json.loads(self._store.get(f"rank {rank}"))
                if waiting is not None:
                    stream, place, issued = waiting
                    streams = {name: Issued.of(one) for name, one in issued.items()}
                    found[rank] = number, Waiting(stream, place, streams)
        return found


class Barriers:
    """Those of a group: each is as messages from all its ranks to all."""

    def __init__(self, board: Board, name: str, ranks: Sequence[int]) -> None:
        self.name = f"{name}: barriers"
        self._board, self._others = board, [rank for rank in ranks if rank != board.rank]
        self._num_over = 0
        self._is_waiting = False
        board.streams.append(self)

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Inside, this rank's host waits for the others."""
        self._is_waiting = True
        with self._board.told(self.name, self._num_over):
            yield
        self._num_over, self._is_waiting = self._num_over + 1, False

    def issued(self) -> Issued:
        """Return what the others are told of it."""
        sides = [(is_send, rank) for is_send in (False, True) for rank in self._others]
        unit = [Message(*side, self._num_over + 1, 0) for side in sides]
        last_over = [(*side, self._num_over) for side in sides]
        return Issued(self._num_over, last_over, [unit] if self._is_waiting else [], -1)


class Play:
    """The streams of hosts that wait, played until nothing moves. Of the others' hosts it is assumed that
    they do what is wanted of them.
    """

    def __init__(self, waiting: Mapping[int, Waiting]) -> None:
        self._waiting = dict(waiting)
        self._left: dict[tuple[int, str], deque[Unit]] = {}
        self._begun: Counter[tuple[str, bool, int, int]] = (
            Counter()
        )  # the last message, by kind, rank and peer
        for rank, one in waiting.items():
            for stream, issued in one.issued.items():
                self._left[rank, stream] = deque(issued.left)
                for is_send, peer, number in issued.last_over:
                    self._begun[stream, is_send, rank, peer] = number
                self._begin(rank, stream)
        while self._move():
            pass

    def cycle(self, rank: int) -> list[str]:
        """Return which messages wait for each other, from what that rank waits for on, if it has no end."""
        found: dict[tuple[int, str], str] = {}
        stream = self._waiting[rank].stream if rank in self._waiting else ""
        while rank in self._waiting and (rank, stream) not in found:
            first = next(one for one in self._left[rank, stream][0] if not self._ends(rank, stream, one))
            said = f"rank {rank} {first} on stream {stream!r}"
            others = self._left.get((first.peer, stream), ())
            if any(one.is_other_side_of(first, rank) for unit in others for one in unit):
                found[rank, stream] = f"{said}, where it comes after others of rank {first.peer}'s"
                rank = first.peer
            else:
                found[rank, stream] = f"{said}, which rank {first.peer} has not asked for"
                rank, stream = first.peer, self._waiting[first.peer].stream
        return [*found.values()]

    def _begin(self, rank: int, stream: str) -> None:
        """Begin with the first of the units that are left."""
        for unit in [*self._left[rank, stream]][:1]:
            for one in unit:
                self._begun[stream, one.is_send, rank, one.peer] = one.number

    def _ends(self, rank: int, stream: str, begun: Message) -> bool:
        if begun.peer not in self._waiting:
            return True
        if begun.is_send and begun.num_bytes <= self._waiting[rank].issued[stream].eager_bytes:
            return True
        return self._begun[stream, not begun.is_send, begun.peer, rank] >= begun.number

    def _move(self) -> bool:
        """End what can end, and let go on whoever waited for it; return whether there was something."""
        moved = False
        for rank, stream in [place for place in self._left if place[0] in self._waiting]:
            left = self._left[rank, stream]
            while left and all(self._ends(rank, stream, one) for one in left[0]):
                left.popleft()
                self._begin(rank, stream)
                moved = True
        for rank, one in [*self._waiting.items()]:
            issued = one.issued[one.stream]
            num_over = issued.num_over + len(issued.left) - len(self._left[rank, one.stream])
            if num_over > one.place:
                del self._waiting[rank]
                moved = True
        return moved
