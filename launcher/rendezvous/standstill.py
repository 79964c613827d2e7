"""A standstill of this process after which the other nodes may have left the job, and the words for it."""

from __future__ import annotations

import time

from ..controller.pulse import Pulse


class Standstill:
    """Looks for standstills: one thread calls `look` again and again. See pulse.py."""

    def __init__(self, *, every_s: float, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._pulse = Pulse(every_s)
        self._lasted_s = 0.0
        self._excuses_until = 0.0

    def look(self) -> bool:
        """Tell whether this process stood still since the last time: then no silence counts before now."""
        gap_s = self._pulse.take_gap_s()
        self._pulse.beat()
        if gap_s > self._heartbeat_s / 2:
            self._lasted_s = gap_s
            self._excuses_until = time.monotonic() + self._heartbeat_s
        return gap_s > 0

    @property
    def began_at(self) -> float:
        return self._excuses_until - self._heartbeat_s - self._lasted_s

    def why(self) -> str:
        """Return the words that explain the end of a connection by our standstill, and not by a fault of the
        other side; empty without one.
        """
        self.look()  # it may be over just now, and this may be the first event after it
        if time.monotonic() > self._excuses_until:
            return ""
        return (
            f"this machine stood still for {self._lasted_s:.0f} s, and nodes leave a job of which they hear "
            "nothing; no other node is at fault: keep this machine awake, or give a longer --heartbeat"
        )
