"""The load of a host: its processors, memory, network and disks.

Counters of the kernel run since the start of the host; a sample is their growth since the last look.
Sources: proc(5), sysfs(5)
"""

from __future__ import annotations

import os
import time

from ..system.kernel_file import read_text
from ..system.lean_stdlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SECTOR_BYTES = 512  # unit of /proc/diskstats, for every disk
_IDLE = (3, 4)  # fields of a line of /proc/stat: idle, and waiting for a disk
_NUM_BUSY_FIELDS = 8  # the two fields after them, time of guests, are in `user` already


class HostSample:
    """Looks at the host; a number that it does not give is left out."""

    def __init__(self, *, proc: str = "/proc", sys: str = "/sys") -> None:
        self._proc, self._sys = proc, sys
        self._disks = self._find_disks()
        self._before = self._counters()

    def look(self) -> dict[str, Any]:
        """Return the growth since the last look, or since this was made. The names: docs/design/events.md."""
        before, now = self._before, self._counters()
        self._before = now
        seconds = max(1e-3, now["at"] - before["at"])
        found: dict[str, Any] = {"cores": os.cpu_count() or 1}
        if "total" in now and "total" in before and now["total"] > before["total"]:
            busy = (now["busy"] - before["busy"]) / (now["total"] - before["total"])
            found["cpu"] = round(min(1.0, max(0.0, busy)), 4)
        for name in ("net_in", "net_out", "disk_read", "disk_write"):
            if name in now and name in before:  # a device that came or went makes no negative rate
                found[name] = max(0, round((now[name] - before[name]) / seconds))
        found.update(self._memory())
        with suppress(OSError):
            found["load1"] = round(os.getloadavg()[0], 2)
        return found

    def _counters(self) -> dict[str, float]:
        found = {"at": time.monotonic()}
        for read in (self._processors, self._network, self._disk_bytes):
            with suppress(OSError, ValueError, IndexError):
                found.update(read())
        return found

    def _processors(self) -> dict[str, float]:
        fields = [float(one) for one in self._text("stat").split("\n", 1)[0].split()[1:]][:_NUM_BUSY_FIELDS]
        total = sum(fields)
        return {"total": total, "busy": total - sum(fields[place] for place in _IDLE)} if fields else {}

    def _network(self) -> dict[str, float]:
        """Bytes over all interfaces that lead out of the host, or out of its container."""
        lines = [line.partition(":") for line in self._text("net/dev").splitlines()[2:]]
        counts = [rest.split() for name, _, rest in lines if name.strip() != "lo" and rest]
        if not counts:
            return {}
        return {
            "net_in": sum(float(one[0]) for one in counts),
            "net_out": sum(float(one[8]) for one in counts),
        }

    def _disk_bytes(self) -> dict[str, float]:
        rows = [line.split() for line in self._text("diskstats").splitlines()]
        rows = [row for row in rows if len(row) > 9 and row[2] in self._disks]
        if not rows:
            return {}
        return {
            "disk_read": _SECTOR_BYTES * sum(float(row[5]) for row in rows),
            "disk_write": _SECTOR_BYTES * sum(float(row[9]) for row in rows),
        }

    def _find_disks(self) -> frozenset[str]:
        """Names of the disks that are a device: no partitions, and no combinations of several disks."""
        folder = os.path.join(self._sys, "block")
        with suppress(OSError):
            names = os.listdir(folder)
            return frozenset(one for one in names if os.path.exists(os.path.join(folder, one, "device")))
        return frozenset()

    def _memory(self) -> dict[str, Any]:
        rows = dict(line.split(":", 1) for line in self._text("meminfo").splitlines() if ":" in line)
        with suppress(KeyError, ValueError, IndexError):
            total = 1024 * int(rows["MemTotal"].split()[0])
            return {
                "mem_total": total,
                "mem_used": total - 1024 * int(rows["MemAvailable"].split()[0]),
            }
        return {}

    def _text(self, name: str) -> str:
        return read_text(os.path.join(self._proc, name))
