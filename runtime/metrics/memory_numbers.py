"""Memory that a rank uses, for the launcher: of its GPU, or of its process."""

from __future__ import annotations

import os
import resource
import time
import weakref
from pathlib import Path

import torch

from ..zero.model.sharded_model import ShardedModel
from .device_memory import bytes_by_kind
from .pipe import file_of

# Kinds take a look at each tensor: the longer they have not changed, the less often.
_KINDS_FIRST_S, _KINDS_LAST_S = 2.0, 60.0
_LOOK_S = 1.5  # numbers are taken so often, for every second line by default
_KIB = 1024
_PAGE = os.sysconf("SC_PAGE_SIZE")
# A container's limit, what it uses, and the row of its cache in memory.stat, by cgroups of version 2 and 1.
_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
)  # fmt: skip


class MemoryNumbers:
    """Memory numbers of one process and its GPU, if it has one.

    Units: bytes
    """

    def __init__(self, device: torch.device) -> None:
        self.models: weakref.WeakSet[ShardedModel] = weakref.WeakSet()
        self._device = device
        self._found: dict[str, int] = {}
        self._found_at = float("-inf")
        self._kinds: dict[str, int] = {}
        self._kinds_at, self._kinds_wait_s = float("-inf"), 0.0
        self._total: int | None = None
        # Open: to open it at each look would cost as much as the rest.
        self._statm: tuple[int, tuple[int, int] | None] | None = None

    def look(self) -> dict[str, int]:
        """Return the present numbers, or those of a moment ago."""
        now = time.monotonic()
        if now - self._found_at >= _LOOK_S:
            self._found, self._found_at = self._look(now), now
        return self._found

    def _look(self, now: float) -> dict[str, int]:
        if self._total is None:
            self._total = (
                torch.cuda.get_device_properties(self._device).total_memory
                if self._device.type == "cuda"
                else host_memory()
            )
        if now - self._kinds_at >= self._kinds_wait_s:
            found = bytes_by_kind(self._device, tuple(self.models))
            kinds = {
                "mem_parameters": found.parameters + found.gathered,
                "mem_gradients": found.gradients,
                "mem_optimizer": found.optimizer,
            }
            wait_s = _KINDS_FIRST_S if kinds != self._kinds else min(2 * self._kinds_wait_s, _KINDS_LAST_S)
            self._kinds, self._kinds_at, self._kinds_wait_s = kinds, now, wait_s
        numbers = self._of_gpu() if self._device.type == "cuda" else self._of_process()
        return {**numbers, "mem_total": self._total, **self._kinds}

    def _of_gpu(self) -> dict[str, int]:
        """Return torch's numbers of the GPU; activations are the memory beside the rest when that was
        most.
        """
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        reserved, allocated = (stats[f"{name}_bytes"]["all"] for name in ("reserved", "allocated"))
        held = sum(self._kinds.values())
        used, most = reserved["current"], allocated["peak"]
        return {
            "mem_used": used,
            "mem_peak": reserved["peak"],
            "mem_activations": max(0, most - held),
            "mem_other": max(0, used - max(most, held)),
        }

    def _of_process(self) -> dict[str, int]:
        if self._statm is None or file_of(self._statm[0]) != self._statm[1]:  # a program may close all files
            fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
            self._statm = fd, file_of(fd)
        used = int(os.pread(self._statm[0], 200, 0).split()[1]) * _PAGE
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
        held = sum(self._kinds.values())
        return {"mem_used": used, "mem_peak": max(peak, used), "mem_other": max(0, used - held)}


def host_memory() -> int:
    """Return what this process may have: the memory of its host, or of its container."""
    limits = (_read_number(f"{folder}/{limit}") for folder, limit, *_ in _CGROUPS)
    return min([_PAGE * os.sysconf("SC_PHYS_PAGES"), *(limit for limit in limits if limit is not None)])


def free_host_memory() -> int:
    """Return the bytes of host memory that programs can have yet, files in the cache included."""
    free = _row("/proc/meminfo", "MemAvailable:", unit=_KIB) or 0
    for folder, limit_file, used_file, cached_row in _CGROUPS:
        limit, used = _read_number(f"{folder}/{limit_file}"), _read_number(f"{folder}/{used_file}")
        if limit is not None and used is not None:
            cached = _row(f"{folder}/memory.stat", cached_row) or 0
            free = min(free, max(0, limit - used + cached))
    return free


def free_device_memory(device: torch.device) -> int:
    """Return the bytes that this process can have yet on a GPU, torch's cache included."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _read_number(path: str) -> int | None:
    try:
        said = Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(said) if said.isdigit() else None


def _row(path: str, name: str, *, unit: int = 1) -> int | None:
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    rows = (line.split() for line in lines)
    return next((int(row[1]) * unit for row in rows if row[:1] == [name]), None)
