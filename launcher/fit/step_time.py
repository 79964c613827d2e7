"""The time of one optimizer step, from amounts of work and the speeds of data sheets. Arithmetic only.

A speed that nobody has measured here is known within a factor, so each part of the time is a range: from what
training gets at best and all that can overlap overlapped, to what it gets at worst and nothing overlapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..job.mesh import HostSlots
from .answer import Rehearsed, StepWork, crosses
from .devices import Gpu

COMPUTE, COMMUNICATION, OPTIMIZER, OFFLOAD, BUBBLE = (
    "compute",
    "communication that is waited for",
    "optimizer on the host",
    "copies to and from the host, and disk",
    "bubble of the pipeline",
)
_GIGA = 1e9
_TERA = 1e12
# What training gets of a data sheet's speed, at worst and at best.
_ARITHMETIC, _MEMORY, _LINK = (0.3, 0.75), (0.5, 0.9), (0.3, 0.85)
_LAUNCH_TIMES = (10e-6, 2e-6)  # seconds of a kernel at least: Python's, or a graph's
# Bytes a second of one rank, from a slow host or network to a fast one: nothing more is known from here.
_NETWORK_SPEEDS = (1e9, 45e9)
_HOST_SPEEDS = (5e9, 60e9)
_DISK_SPEEDS = (0.5e9, 6e9)
_HIDDEN = 0.9  # largest share of computing beside which messages and copies cost nothing


class TimeRange(NamedTuple):
    """A time between two bounds."""

    low: float
    high: float

    def plus(self, other: TimeRange) -> TimeRange:
        """Return the sum."""
        return TimeRange(self.low + other.low, self.high + other.high)


_NO_TIME = TimeRange(0.0, 0.0)


def times_of(
    rehearsed: Sequence[Rehearsed], gpu: Gpu, hosts: Sequence[HostSlots], *, num_stages: int
) -> tuple[dict[str, TimeRange], ...]:
    """Return the parts of the second step's time of each kind of rank."""
    found = []
    for one in rehearsed:
        work = one.answer.steps[-1]
        leaves = {sent.axis: crosses(sent.ranks, hosts) for sent in work.sent}
        micro_batches = dict(one.answer.model).get("num_micro_batches", 1)
        found.append(
            step_time(work, gpu, leaves_host=leaves, num_stages=num_stages, num_micro_batches=micro_batches)
        )
    return tuple(found)


def step_time(
    work: StepWork, gpu: Gpu, *, leaves_host: Mapping[str, bool], num_stages: int, num_micro_batches: int
) -> dict[str, TimeRange]:
    """Return the parts of a step's time, in the order of this module's names; their sum is the step.

    `leaves_host`: whether messages along an axis go between hosts
    """
    compute = _compute(work, gpu)
    sent = _NO_TIME
    for one in work.sent:
        inside = (gpu.link_gb_per_s or gpu.pcie_gb_per_s) / 2 * _GIGA
        speeds = _NETWORK_SPEEDS if leaves_host[one.axis] else [inside * part for part in _LINK]
        sent = sent.plus(_at(one.num_bytes, speeds))
    copied = dict(work.copied_bytes)
    disk = sum(num_bytes for way, num_bytes in copied.items() if "disk" in way)
    pcie = gpu.pcie_gb_per_s / 2 * _GIGA
    moved = _at(sum(copied.values()) - disk, [pcie * part for part in _LINK]).plus(_at(disk, _DISK_SPEEDS))
    idle = (num_stages - 1) / max(num_micro_batches, 1)
    return {
        COMPUTE: compute,
        COMMUNICATION: _beside(sent, compute),
        OPTIMIZER: _at(work.host_bytes, _HOST_SPEEDS),
        OFFLOAD: _beside(moved, compute),
        BUBBLE: TimeRange(compute.low * idle, compute.high * idle),
    }


def whole_step(parts: Mapping[str, TimeRange]) -> TimeRange:
    """Return the time of all parts together."""
    found = _NO_TIME
    for one in parts.values():
        found = found.plus(one)
    return found


def _compute(work: StepWork, gpu: Gpu) -> TimeRange:
    """Return the sum over groups of operations of what holds each up: arithmetic, memory, or its launches."""
    peaks = {
        "bfloat16": gpu.bf16_tflops or gpu.fp32_tflops,
        "float16": gpu.fp16_tflops or gpu.fp32_tflops,
    }
    bounds = []
    for at in (1, 0):
        seconds = 0.0
        for one in work.on_device:
            flops_per_s = peaks.get(one.dtype, gpu.fp32_tflops) * _TERA * _ARITHMETIC[at]
            bytes_per_s = gpu.memory_gb_per_s * _GIGA * _MEMORY[at]
            launches = one.num_kernels * _LAUNCH_TIMES[at]
            seconds += max(one.flops / flops_per_s, one.moved_bytes / bytes_per_s, launches)
        bounds.append(seconds)
    return TimeRange(*bounds)


def _at(num_bytes: int, speeds: Sequence[float]) -> TimeRange:
    slow, fast = speeds
    return TimeRange(num_bytes / fast, num_bytes / slow)


def _beside(found: TimeRange, compute: TimeRange) -> TimeRange:
    """Return what is left of it where it overlaps with computing as well as it can, and where not at all."""
    return TimeRange(max(0.0, found.low - _HIDDEN * compute.low), found.high)
