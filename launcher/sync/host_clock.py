"""The offset of a host's clock from ours at a given time, and its error."""

from __future__ import annotations

from typing import NamedTuple

KEPT_EVERY_S = 60.0
NEAR_S = 180.0  # clocks of good machines drift by less than 20 us in a second


class Offset(NamedTuple):
    """Our monotonic clock minus the host's, and its possible error."""

    seconds: float
    error_s: float


class HostClock:
    """The clock of one host, known by its answers to pings: for each, both clocks are known for a moment
    between the ping and the answer. One answer a minute is kept, the quickest.
    """

    def __init__(self) -> None:
        self._samples: dict[int, tuple[float, Offset]] = {}  # by minute: when on the host's clock

    def add(self, *, sent_at: float, at: float, heard_at: float) -> None:
        """Add an answer: times of the ping and the answer on our clock, and of the answer on the host's."""
        offset = Offset((sent_at + heard_at) / 2 - at, (heard_at - sent_at) / 2)
        minute = int(at // KEPT_EVERY_S)
        before = self._samples.get(minute)
        if before is None or offset.error_s < before[1].error_s:
            self._samples[minute] = at, offset

    def offset_at(self, at: float) -> Offset | None:
        """Return the offset at a time on the host's clock: of the answers near it the quickest one's, else
        the nearest one's; None if there was no answer at all.
        """
        near = [offset for when, offset in self._samples.values() if abs(when - at) <= NEAR_S]
        if near:
            return min(near, key=lambda one: one.error_s)
        if not self._samples:
            return None
        return min(self._samples.values(), key=lambda one: abs(one[0] - at))[1]
