"""Standstills of this process: it may have been stopped, or the machine suspended."""

from __future__ import annotations

import threading
import time

MAX_PING_EVERY_S = 5.0
LATE_S = 1.0  # a busy machine may take so long for a beat


def awake_s() -> float:
    """Return the time of a clock that goes on while the machine is suspended, if the system has one."""
    clock: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class Pulse:
    """Beats of one thread, which calls `beat` often; from a gap another thread sees that the process stood
    still.
    """

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self._lock = threading.Lock()
        self._beat_at = awake_s()
        self._gap_s = 0.0

    def beat(self) -> None:
        with self._lock:
            now = awake_s()
            self._gap_s = max(self._gap_s, now - self._beat_at)
            self._beat_at = now

    def take_gap_s(self) -> float:
        """Return the longest time without a beat since the last call; 0 if it is no longer than LATE_S."""
        with self._lock:
            now = awake_s()
            gap_s = max(self._gap_s, now - self._beat_at)
            self._gap_s = 0.0
            if gap_s < self.every_s + LATE_S:
                return 0.0
            self._beat_at = now  # count from now, so that a gap is reported once
            return gap_s
