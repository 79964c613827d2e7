"""Speeds of one rank while the other ranks of its host work, too: measured, or promised by a data sheet.

Units: seconds, bytes, multiplications and additions (flops)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from .devices import Gpu

Points = tuple[tuple[float, float], ...]  # points of a curve, ordered by their first number
_T = TypeVar("_T")

_GIGA = 1e9
_TERA = 1e12
# What training gets of a data sheet's speed, at worst and at best.
_ARITHMETIC, _MEMORY, _LINK = (0.3, 0.75), (0.5, 0.9), (0.3, 0.85)
_LAUNCH_TIMES = (10e-6, 2e-6)  # seconds of a kernel at least: Python's, or a graph's
# Bytes a second of one rank, from a slow host or network to a fast one: nothing more is known from here.
_NETWORK_SPEEDS = (1e9, 45e9)
_HOST_SPEEDS = (5e9, 60e9)
_DISK_SPEEDS = (0.5e9, 6e9)
MOST_HIDDEN = 0.9  # largest share of computing beside which messages and copies cost nothing
OTHER = ""  # the dtype, or the collective, of which nothing is known by its name


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The speeds of a rank. Of a name that is not there, the first entry counts; 0: not known, and no time.

    `arithmetic` has by dtype flops a second by flops for each byte, `memory` by dtype bytes a second of
    operations without flops, `inside` and `between` by collective the seconds of a message by the bytes that
    a rank sends, inside a host and between hosts.
    """

    is_measured: bool  # arithmetic is then what products of matrices reached, memory included
    arithmetic: tuple[tuple[str, Points], ...]
    memory: tuple[tuple[str, float], ...]
    launch_s: float  # the time of an operation that does next to nothing
    adds_launches: bool  # the processor that launches computes, too
    inside: tuple[tuple[str, Points], ...]
    between: tuple[tuple[str, Points], ...]
    update_bytes_per_s: float  # the host's optimizer reads and writes each array
    copied_bytes_per_s: float  # between host and GPU
    disk_bytes_per_s: float
    hidden: float  # share of computing beside which messages and copies cost nothing

    def operation_s(self, *, dtype: str, flops: int, moved_bytes: int, number: int) -> float:
        """Return the time of operations that are alike: what holds them up is the slowest of arithmetic,
        memory and launches.
        """
        moved_s = _quotient(moved_bytes, _of(self.memory, dtype, 0.0))
        points = _of(self.arithmetic, dtype, ())
        flops_s = _quotient(flops, between_points(points, flops / max(moved_bytes, 1)))
        work_s = flops_s if flops and self.is_measured else max(moved_s, flops_s)
        launches_s = number * self.launch_s
        return work_s + launches_s if self.adds_launches else max(work_s, launches_s)

    def message_s(self, kind: str, num_bytes: int, number: int, *, leaves_host: bool) -> float:
        """Return the time of messages of a collective, all of about one size."""
        points = _of(self.between if leaves_host else self.inside, kind, ())
        if not points or not num_bytes:
            return 0.0
        number = max(number, 1)
        size = num_bytes / number
        last_bytes, last_s = points[-1]
        if size > last_bytes:
            return number * last_s * size / last_bytes
        return number * between_points(points, size)

    def copy_s(self, way: str, num_bytes: int) -> float:
        """Return the time of a copy between host and GPU, or host and disk."""
        return _quotient(num_bytes, self.disk_bytes_per_s if "disk" in way else self.copied_bytes_per_s)

    def update_s(self, num_bytes: int) -> float:
        """Return the time of the host's optimizer."""
        return _quotient(num_bytes, self.update_bytes_per_s)


class SpeedRange(NamedTuple):
    """Speeds at worst and at best; the same twice, if they were measured."""

    worst: Speeds
    best: Speeds


def speeds_of_sheet(gpu: Gpu) -> SpeedRange:
    """Return the speeds that training gets of what the data sheet promises."""
    worst, best = (_of_sheet(gpu, at) for at in (0, 1))
    return SpeedRange(worst, best)


def _of_sheet(gpu: Gpu, at: int) -> Speeds:
    tflops = {
        OTHER: gpu.fp32_tflops,
        "bfloat16": gpu.bf16_tflops or gpu.fp32_tflops,
        "float16": gpu.fp16_tflops or gpu.fp32_tflops,
    }
    inside = (gpu.link_gb_per_s or gpu.pcie_gb_per_s) / 2 * _GIGA * _LINK[at]
    return Speeds(
        is_measured=False,
        arithmetic=tuple((dtype, ((1.0, one * _TERA * _ARITHMETIC[at]),)) for dtype, one in tflops.items()),
        memory=((OTHER, gpu.memory_gb_per_s * _GIGA * _MEMORY[at]),),
        launch_s=_LAUNCH_TIMES[at],
        adds_launches=False,
        inside=((OTHER, ((1.0, 1 / inside),)),),
        between=((OTHER, ((1.0, 1 / _NETWORK_SPEEDS[at]),)),),
        update_bytes_per_s=_HOST_SPEEDS[at],
        copied_bytes_per_s=gpu.pcie_gb_per_s / 2 * _GIGA * _LINK[at],
        disk_bytes_per_s=_DISK_SPEEDS[at],
        hidden=(0.0, MOST_HIDDEN)[at],
    )


def between_points(points: Points, at: float) -> float:
    """Return the value of a curve, a straight line from one of its points to the next, level before the first
    and behind the last; 0 without points.
    """
    before: tuple[float, float] | None = None
    for point in points:
        if at <= point[0]:
            if before is None:
                return point[1]
            share = (at - before[0]) / (point[0] - before[0])
            return before[1] + share * (point[1] - before[1])
        before = point
    return 0.0 if before is None else before[1]


def _of(by_name: Sequence[tuple[str, _T]], name: str, default: _T) -> _T:
    found = dict(by_name)
    return found.get(name, next(iter(found.values()), default))


def _quotient(amount: float, per_second: float) -> float:
    return amount / per_second if per_second else 0.0
