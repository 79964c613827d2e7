"""The controllers of the other nodes, where each node of a job has its own: messages to them, and events from
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..job.verdict import Failure, HostFailure


class Peers(Protocol):
    """The other nodes, as a controller sees them. No method blocks; the answers are PeerEvents."""

    def part_is_ready(self) -> None: ...

    def part_failed(self, failure: Failure) -> None: ...

    def part_was_interrupted(self, number: int) -> None: ...

    def part_ended(self) -> None: ...


class PeerEvent(NamedTuple):
    """An event of the peers: a failure elsewhere, a start, an end."""

    failure: Failure | None = None
    is_start_allowed: bool = False
    is_finished: bool = False


class PeerTalk:
    """Tells the peers each failure and interrupt of this part once.

    Without peers the start is always allowed, and the peers count as finished.
    """

    def __init__(self, peers: Peers | None) -> None:
        self._peers = peers
        self._num_told = 0  # failures that the peers know, or need not hear of
        self._is_interrupt_told = False
        self.is_start_allowed = self.is_finished = peers is None

    @property
    def is_there(self) -> bool:
        return self._peers is not None

    def ready(self) -> None:
        if self._peers is not None:
            self._peers.part_is_ready()

    def ended(self) -> None:
        if self._peers is not None:
            self._peers.part_ended()

    def tell(
        self, failures: Sequence[Failure], interrupts: Sequence[int], *, stopped_at: float | None
    ) -> None:
        """Tell the peers new failures and interrupts, but not failures that only followed from stopping."""
        if self._peers is None:
            return
        for failure in failures[self._num_told :]:
            is_early = stopped_at is None or failure.at_s <= stopped_at
            if is_early or isinstance(failure, HostFailure):
                self._peers.part_failed(failure)
        self._num_told = len(failures)
        if interrupts and not self._is_interrupt_told:
            self._is_interrupt_told = True
            self._peers.part_was_interrupted(interrupts[0])

    def hear(self, event: PeerEvent) -> None:
        self.is_start_allowed = self.is_start_allowed or event.is_start_allowed
        self.is_finished = self.is_finished or event.is_finished

    def knows(self, num_failures: int) -> None:
        """Note that the peers know our first `num_failures` failures: the last of them came from a peer."""
        self._num_told = num_failures
