"""Messages between two ranks in the order in which NCCL runs those of a group that is bound to a device: on
one stream of each rank, as they were issued.

A large send ends when its receive runs, a small one at once. Those of a batch run together, as one unit.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .standstill import Board, Issued, Message

LIMIT_S = 150.0  # of a message that no rank may ever want; less than what a test's ranks may take
EAGER_ENV = (
    "FAKE_NCCL_EAGER_BYTES"  # how large a send may be that ends before its receive runs; 0 unless given
)
_TAG = 2**29  # for gloo; NCCL has no tags
_PATIENCE_S = 0.3  # of a host, before it tells the others that it waits
_POLL_S = 0.1


class Asked(NamedTuple):
    """One message, as a program asks for it."""

    is_send: bool
    peer: int  # in the group
    value: Tensor  # on the host
    target: Tensor | None = None  # on the device; of what is sent, none


class Unit:
    """Messages that run together."""

    def __init__(self, place: int, asked: Sequence[Asked], messages: Sequence[Message]) -> None:
        self.place, self.asked, self.messages = place, list(asked), list(messages)
        self.over = threading.Event()
        self.error: Exception | None = None


class MessageQueue:
    """One stream of a group on this rank. A thread does its work whatever the host does meanwhile, as a
    device does; what is received gets to the device at the first wait for it, or for what came later.
    """

    def __init__(
        self, native: Any, stream: int, gloo: Any, board: Board, *, name: str, ranks: Sequence[int]
    ) -> None:
        """`name` is the same on all ranks; `ranks` are those of the group, as they are called in the job."""
        self.name = name
        self._native, self.stream, self._gloo = native, stream, gloo
        self._board, self._ranks = board, list(ranks)
        self._eager_bytes = int(os.environ.get(EAGER_ENV, "0"))
        self._lock = threading.Lock()
        self._num_issued = self._num_over = 0
        self._numbers: Counter[tuple[bool, int]] = Counter()  # of messages, by kind and rank
        self._last_over: dict[tuple[bool, int], int] = {}
        self._left: deque[Unit] = deque()
        self._hidden: deque[Unit] = deque()  # what they received is not on the device yet
        self._delivering = threading.Lock()
        self._asked: queue.SimpleQueue[Unit | None] = queue.SimpleQueue()
        self._sent: list[tuple[Any, Tensor]] = []  # gloo reads them until they have been received
        board.streams.append(self)
        threading.Thread(target=self._work, name=f"fake nccl {name}", daemon=True).start()

    def issue(self, asked: Sequence[Asked]) -> Unit:
        """Have them run after all that was issued before."""
        with self._lock:
            messages = []
            for one in asked:
                rank = self._ranks[one.peer]
                self._numbers[one.is_send, rank] += 1
                messages.append(
                    Message(one.is_send, rank, self._numbers[one.is_send, rank], one.value.nbytes)
                )
            unit = Unit(self._num_issued, asked, messages)
            self._num_issued += 1
            self._left.append(unit)
            self._hidden.append(unit)
        self._asked.put(unit)
        return unit

    def finish(self, unit: Unit | None = None) -> None:
        """Wait for all up to this unit, or for all there are.

        Errors:  RuntimeError if ranks wait for each other
        """
        last = unit or (self._hidden[-1] if self._hidden else None)
        if last is None:
            return
        if not last.over.wait(_PATIENCE_S):
            self._wait_for(last)
        with self._delivering:
            while self._hidden and self._hidden[0].place <= last.place:
                first = self._hidden.popleft()
                if first.error is not None:
                    raise RuntimeError(f"{first.messages[0]} on stream {self.name!r}: {first.error}")
                for one in first.asked:
                    if one.target is not None:
                        self._native.deliver(one.target.detach(), one.value, self.stream)
                first.asked.clear()  # memory on the device is no longer held

    def issued(self) -> Issued:
        """Return what the others are told of it."""
        with self._lock:
            last_over = [(*key, number) for key, number in self._last_over.items()]
            return Issued(self._num_over, last_over, [one.messages for one in self._left], self._eager_bytes)

    def stop(self) -> None:
        """There are no more."""
        if self in self._board.streams:
            self._board.streams.remove(self)
        self._asked.put(None)

    def _wait_for(self, unit: Unit) -> None:
        end = time.monotonic() + LIMIT_S
        with self._board.told(self.name, unit.place):
            while not unit.over.wait(_POLL_S):
                why = self._board.standstill()
                if why is None and time.monotonic() > end:
                    first = f"rank {self._board.rank} {unit.messages[0]}"
                    why = f"{first} on stream {self.name!r}, and has waited for {LIMIT_S:g} s"
                if why is not None:
                    raise RuntimeError(f"fake NCCL: {why}")

    def _work(self) -> None:
        while (unit := self._asked.get()) is not None:
            try:
                self._run(unit)
            except Exception as error:  # gloo's, which the host is told where it waits
                unit.error = error
            with self._lock:
                self._num_over += 1
                self._last_over |= {(one.is_send, one.peer): one.number for one in unit.messages}
                self._left.popleft()
            unit.over.set()

    def _run(self, unit: Unit) -> None:
        awaited = []
        for one in unit.asked:
            begin = self._gloo.send if one.is_send else self._gloo.recv
            work = begin([one.value], one.peer, _TAG)
            if one.is_send and one.value.nbytes <= self._eager_bytes:
                self._sent.append((work, one.value))
            else:
                awaited.append(work)
        for work in awaited:
            work.wait()
        self._sent = [one for one in self._sent if not one[0].is_completed()]
