"""Memory of a host, by its cgroups and limits."""

from __future__ import annotations

import os

from .kernel_file import read_text


class MemoryGroup:
    """A memory cgroup of version 1 or 2. Counters that cannot be read are 0 or None."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._is_v1 = os.path.exists(os.path.join(folder, "memory.limit_in_bytes"))

    def kills(self) -> int | None:
        """Number of its processes that the kernel killed for memory."""
        return self._counter("memory.oom_control" if self._is_v1 else "memory.events", "oom_kill")

    def hits(self) -> int:
        """Number of times its limit was reached with nothing left to give back."""
        if self._is_v1:
            return int(self._text("memory.failcnt") or 0)
        return self._counter("memory.events", "oom") or 0

    def was_full(self) -> bool:
        """Tell whether its memory with swap has ever been at a limit of its own.

        Version 1 only, where a container without swap has one: Linux 6.18 does not count how often.
        """
        limit, most = (self._text(f"memory.memsw.{name}_in_bytes").strip() for name in ("limit", "max_usage"))
        return limit.isdigit() and most.isdigit() and int(most) >= int(limit)

    def limit_bytes(self) -> int | None:
        text = self._text("memory.limit_in_bytes" if self._is_v1 else "memory.max").strip()
        return int(text) if text.isdigit() and int(text) < 1 << 60 else None

    def used_bytes(self) -> int | None:
        """Memory that counts against its limit and cannot be given back by the kernel at once."""
        text = self._text("memory.usage_in_bytes" if self._is_v1 else "memory.current").strip()
        idle = self._counter("memory.stat", "total_inactive_file" if self._is_v1 else "inactive_file")
        return max(0, int(text) - (idle or 0)) if text.isdigit() else None

    def _counter(self, file: str, name: str) -> int | None:
        for line in self._text(file).splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
        return None

    def _text(self, name: str) -> str:
        return read_text(os.path.join(self.folder, name))


def memory_groups(proc: str = "/proc") -> list[MemoryGroup]:
    """Return the memory cgroup of this process, then those above it as far as they can be seen here."""
    paths = {}
    for line in read_text(os.path.join(proc, "self", "cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            paths[name] = path
    is_v1 = "memory" in paths
    own = paths.get("memory" if is_v1 else "")
    for line in read_text(os.path.join(proc, "self", "mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split(None, 2)
        is_it = kind == "cgroup" and "memory" in options.split(",") if is_v1 else kind == "cgroup2"
        if is_it and own is not None:
            return [MemoryGroup(folder) for folder in _folders(own, root=root, mount=mount)]
    return []


def _folders(path: str, *, root: str, mount: str) -> list[str]:
    """List the folders from a cgroup up to the mount.

    In a container the path may be one of the host, which is not there.
    """
    below = path[len(root.rstrip("/")) :] if (path + "/").startswith(root.rstrip("/") + "/") else ""
    names = [name for name in below.split("/") if name]
    folders = ["/".join([mount, *names[:depth]]) for depth in range(len(names), -1, -1)]
    return [folder for folder in folders if os.path.isdir(folder)] if ".." not in names else [mount]


def size_of(num_bytes: int) -> str:
    """Write a size in the largest unit that keeps it readable."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 10 << power or (num_bytes and num_bytes % (1 << power) == 0):
            return f"{num_bytes / (1 << power):.0f} {unit}"
    return f"{num_bytes} bytes"
