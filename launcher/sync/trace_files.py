"""What the hosts have written of the steps that were traced, and how far their clocks are from ours."""

from __future__ import annotations

import os
import shutil
import tempfile

from .collector import Collector
from .host_clock import HostClock


class TraceFiles:
    """Of all attempts. What comes lies in `folder`/HOST until `forget`."""

    def __init__(self) -> None:
        """Errors: OSError if no temporary folder can be made"""
        self.folder = tempfile.mkdtemp(prefix="dslaunch-trace-")
        self.collector = Collector(["trace-*"], os.fsencode(self.folder), option="--trace", is_own=True)
        self._clocks: dict[str, HostClock] = {}

    def clock_of(self, host: str) -> HostClock:
        """That of the host of this name."""
        return self._clocks.setdefault(host, HostClock())

    def was_brought(self, host: str, name: str) -> bool:
        """Whether this file of this host, if there was one, could be written here."""
        path = os.path.join(self.folder, host, name)
        return not any(problem.startswith(path) for problem in self.collector.problems)

    def num_bytes(self) -> int:
        """Of all that has come."""
        found = (os.path.join(folder, name) for folder, _, names in os.walk(self.folder) for name in names)
        return sum(os.path.getsize(one) for one in found)

    def empty(self) -> None:
        """Forget what an attempt has brought."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        self._clocks.clear()

    def forget(self) -> None:
        """Leave nothing."""
        shutil.rmtree(self.folder, ignore_errors=True)
