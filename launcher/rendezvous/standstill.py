"""Whether this process stood still for so long that the other nodes may have left the job,
and what to say of that.
"""

from __future__ import annotations

import time

from ..controller.pulse import Pulse


class Standstill:
    """One thread calls `look` again and again. See pulse.py."""

    def __init__(self, *, every_s: float, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._pulse = Pulse(every_s)
        self._lasted_s = 0.0
        self._excuses_until = 0.0

    def look(self) -> bool:
        """Whether this process stood still since the last time: then no silence counts before now."""
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
        """What explains the end of a connection now, in the place of a fault of the other side;
        empty if nothing does.
        """
        self.look()  # it may be over just now, and this be the first that is heard
        if time.monotonic() > self._excuses_until:
            return ""
        return (
            f"this machine stood still for {self._lasted_s:.0f} s, and nodes leave a job of which they hear "
            "nothing; no other node is at fault: keep this machine awake, or give a longer --heartbeat"
        )
