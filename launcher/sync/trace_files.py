"""The hosts' files about traced steps, and the offsets of their clocks."""

from __future__ import annotations

import os
import shutil
import tempfile

from .collector import Collector
from .host_clock import HostClock


class TraceFiles:
    """The files of all attempts. They lie in `folder`/HOST until `forget`."""

    def __init__(self) -> None:
        """Errors: OSError if no temporary folder can be made"""
        self.folder = tempfile.mkdtemp(prefix="dslaunch-trace-")
        self.collector = Collector(["trace-*"], os.fsencode(self.folder), option="--trace", is_own=True)
        self._clocks: dict[str, HostClock] = {}

    def clock_of(self, host: str) -> HostClock:
        """Return the clock of the host of this name."""
        return self._clocks.setdefault(host, HostClock())

    def was_brought(self, host: str, name: str) -> bool:
        """Tell whether this file of this host, if there was one, could be written here."""
        path = os.path.join(self.folder, host, name)
        return not any(problem.startswith(path) for problem in self.collector.problems)

    def num_bytes(self) -> int:
        """Number of bytes of all files."""
        found = (os.path.join(folder, name) for folder, _, names in os.walk(self.folder) for name in names)
        return sum(os.path.getsize(one) for one in found)

    def empty(self) -> None:
        """Forget the files of an attempt."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        self._clocks.clear()

    def forget(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
