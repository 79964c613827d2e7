"""Reductions of gradients that are under way."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from ...comm.collectives import Collectives
from ...comm.pending import Pending
from ..gradients.gradients import FlatGradients
from ..units.sub_buffer import SubBuffer

G = TypeVar("G", bound=FlatGradients)


class Reductions(Generic[G]):
    """Collectives under way, fewer than `limit` after each that is begun; None: any number."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._under_way: deque[tuple[G, Pending]] = deque()
        self._kept: list[G] = []  # gradients kept since the last drain
        self._comms: set[Collectives] = set()

    def begin(self, sub_buffer: SubBuffer, gradients: G) -> None:
        """Average the gradients of a sub-buffer."""
        comm = sub_buffer.comm
        self._comms.add(comm)
        pending = comm.reduce_scatter_or_all_reduce(gradients.flat, what=sub_buffer.label)
        self._under_way.append((gradients, pending))
        if len(self._under_way) == self._limit:
            self._finish_first()

    def keep_fewer_than(self, limit: int) -> None:
        """Wait for the first ones, until fewer than `limit` are under way."""
        while len(self._under_way) >= limit:
            self._finish_first()

    def drain(self) -> None:
        """Wait for all."""
        while self._under_way:
            self._finish_first()
        self._kept.clear()
        self._let_go()

    def finish(self, gradients: G) -> None:
        """Wait for all up to this one."""
        while any(one is gradients for one, _ in self._under_way):
            self._finish_first()

    def abandon(self) -> list[G]:
        """End everything under way and keep nothing of it; return what has been kept since the last drain."""
        while self._under_way:
            _, pending = self._under_way.popleft()
            pending.wait()  # the memory is in use until then
        self._let_go()
        kept, self._kept = self._kept, []
        return kept

    def _let_go(self) -> None:
        """Free the buffers that the reductions have used one after the other."""
        for comm in self._comms:
            comm.forget_buffers()
        self._comms.clear()

    def _finish_first(self) -> None:
        gradients, pending = self._under_way.popleft()
        pending.wait()
        gradients.keep()
        self._kept.append(gradients)
