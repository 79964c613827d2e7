"""The memory that snapshots may take on this host."""

from __future__ import annotations

from ..system.kernel_file import read_text
from ..system.memory import memory_groups

_RESERVE = 32  # one part of so many stays free for what the workers take later


def free_bytes(proc: str = "/proc") -> int | None:
    """Return the memory that can be taken now: what the kernel says, or less by a cgroup's limit, and less
    a reserve. None: the kernel does not say it.
    """
    found: list[int] = []
    for line in read_text(f"{proc}/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name == "MemAvailable" and words:
            found.append(int(words[0]) << 10)
    for group in memory_groups(proc):
        limit, used = group.limit_bytes(), group.used_bytes()
        if limit is not None and used is not None:
            found.append(max(0, limit - used))
    if not found:
        return None
    least = min(found)
    return least - least // _RESERVE
