"""A point in time of a processor that finishes each call before the next."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from ...errors import ConfigError


class HostEvent:
    """Event like torch.cuda.Event where each call is done when it returns: the host's clock says
    when it was recorded.
    """

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        """`blocking` chooses how to wait, and there is nothing to wait for."""
        if interprocess:
            raise ConfigError(
                "Event(interprocess=True): events of the CPU belong to their process; leave it out"
            )
        self._has_timing = enable_timing
        self._recorded_at: float | None = None  # seconds

    def record(self, stream: Any = None) -> None:
        """Note the time; there is one stream."""
        self._recorded_at = perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Do nothing: the event has happened."""

    def synchronize(self) -> None:
        """Do nothing: the event has happened."""

    def query(self) -> bool:
        """Return True: all work before the event is done."""
        return True

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Return the milliseconds from this event to that one.

        Errors: RuntimeError unless both were made with enable_timing=True and are recorded
        """
        if not (self._has_timing and end_event._has_timing):
            raise RuntimeError(
                "elapsed_time() of events without a time; make both with Event(enable_timing=True)"
            )
        if self._recorded_at is None or end_event._recorded_at is None:
            raise RuntimeError("elapsed_time() of an event that is not recorded; call record() on both")
        return (end_event._recorded_at - self._recorded_at) * 1e3
