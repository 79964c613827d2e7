"""The messages of one engine, over however many groups of ranks: counted, numbered and remembered in one
order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from .byte_meter import Meter
from .comms_log import process_log
from .flight_recorder import Flight, FlightRecorder, Line


class Wire:
    """Wire of one engine."""

    # Called before the next collective of any engine; it may have collectives of its own.
    before_next: ClassVar[Callable[[], None] | None] = None

    def __init__(self) -> None:
        self.meter = Meter()
        self.recorder = FlightRecorder()
        self._log = process_log()
        # Called with `what` before parameters are gathered from shards.
        self.before_gather: Callable[[str], None] = nothing_before

    def begin(
        self,
        op: str,
        tensor: Tensor | None,
        what: str,
        *,
        sent_bytes: int | None = None,
        counted_as: str | None = None,
        lane: int = 0,
        line: Line = Line(),  # noqa: B008  (it cannot change)
    ) -> Flight:
        """Count and note a collective; all pass here before they are sent. Objects that torch pickles are no
        `tensor`.
        """
        if Wire.before_next is not None:
            Wire.before_next()
        nbytes = 0 if tensor is None else tensor.nbytes
        self.meter.record(counted_as or op, what, nbytes=nbytes, sent_bytes=sent_bytes, lane=lane, line=line)
        stopwatch = None
        if self._log.is_on:
            whole = None if tensor is None else nbytes
            stopwatch = self._log.stopwatch(op, what, nbytes=whole, sent_bytes=sent_bytes)
        return self.recorder.begin(op, what, nbytes=nbytes, lane=lane, line=line, stopwatch=stopwatch)


def before_unwired() -> None:
    """Do what is to be done before a collective that passes no wire.

    Order: a collective
    """
    if Wire.before_next is not None:
        Wire.before_next()


def nothing_before(what: str) -> None:
    """Do nothing before a gather."""
