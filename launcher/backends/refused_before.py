"""Hosts where our own SSH was refused, and the system's `ssh` got in: a later start begins with the
system's.
"""

from __future__ import annotations

import threading


class RefusedBefore:
    """Remembers hosts for all starts of one command. Any thread may use it."""

    def __init__(self) -> None:
        self._because: dict[str, str] = {}  # by the name of the host
        self._lock = threading.Lock()

    def why(self, host: str) -> str:
        """Return the reason for the system's ssh; empty if our own SSH comes first."""
        with self._lock:
            return self._because.get(host, "")

    def note(self, host: str, because: str) -> None:
        """Remember the reason; empty: our own SSH comes first again."""
        with self._lock:
            self._because[host] = because
