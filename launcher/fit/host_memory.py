"""Host memory: what this machine has, and what a rank takes before its first tensor."""

from __future__ import annotations

from ..node.system.kernel_file import read_text
from ..node.system.memory import memory_groups

# VmRSS of a rank on a CPU that has imported torch 2.13 and dslaunch, joined a group of gloo and taken a step
# of a model with 20 parameters: 266 MiB, a third of it pages of libraries that ranks of a host may share.
CPU_PROCESS_BYTES = 266 << 20
# A rank on a GPU takes CUDA's libraries and context, too. Assumed; not measured.
GPU_PROCESS_BYTES = 2 << 30


def process_bytes(*, has_gpus: bool) -> int:
    """Return what a rank's process takes before its first tensor."""
    return GPU_PROCESS_BYTES if has_gpus else CPU_PROCESS_BYTES


def memory_here(proc: str = "/proc") -> int | None:
    """Return the memory that a job may use on this machine: the kernel's, or less by a cgroup's limit.

    None: the kernel does not say it.
    """
    rows = (line.split() for line in read_text(f"{proc}/meminfo").splitlines())
    total = next((row[1:] for row in rows if row[:1] == ["MemTotal:"]), [])
    limits = [limit for one in memory_groups(proc) if (limit := one.limit_bytes()) is not None]
    found = [*([int(total[0]) << 10] if total else []), *limits]
    return min(found, default=None)
