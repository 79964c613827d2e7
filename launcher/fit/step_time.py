"""The time of one optimizer step, from amounts of work and the speeds of a rank. Arithmetic only.

Speeds that were measured give one number for each part. Of data sheets a speed is known within a factor, so
each part is a range: from what training gets at best and all that can overlap overlapped, to what it gets at
worst and nothing overlapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..job.mesh import HostSlots
from .answer import Rehearsed, StepWork, crosses
from .speeds import SpeedRange, Speeds

COMPUTE, COMMUNICATION, OPTIMIZER, OFFLOAD, BUBBLE = (
    "compute",
    "communication that is waited for",
    "optimizer",
    "copies to and from the host, and disk",
    "bubble of the pipeline",
)
Factors = Mapping[str, float]  # by part: what measured runs took of what was predicted; 1 for those not named


class TimeRange(NamedTuple):
    """A time between two bounds; one number, if both are the same."""

    low: float
    high: float

    def plus(self, other: TimeRange) -> TimeRange:
        """Return the sum."""
        return TimeRange(self.low + other.low, self.high + other.high)

    @property
    def is_number(self) -> bool:
        """Tell whether it follows from speeds that were measured."""
        return self.low == self.high


_NO_TIME = TimeRange(0.0, 0.0)


def times_of(
    rehearsed: Sequence[Rehearsed],
    speeds: SpeedRange,
    hosts: Sequence[HostSlots],
    *,
    num_stages: int,
    factors: Factors | None = None,
) -> tuple[dict[str, TimeRange], ...]:
    """Return the parts of the second step's time of each kind of rank."""
    found = []
    for one in rehearsed:
        work = one.answer.steps[-1]
        leaves: dict[str, bool] = {}  # a stage has two neighbours along pp
        for sent in work.sent:
            leaves[sent.axis] = leaves.get(sent.axis, False) or crosses(sent.ranks, hosts)
        micro_batches = dict(one.answer.model).get("num_micro_batches", 1)
        idle = (num_stages - 1) / max(micro_batches, 1)
        parts = step_range(work, speeds, leaves_host=leaves, idle=idle)
        found.append({name: _times(time, (factors or {}).get(name, 1.0)) for name, time in parts.items()})
    return tuple(found)


def step_range(
    work: StepWork, speeds: SpeedRange, *, leaves_host: Mapping[str, bool], idle: float = 0.0
) -> dict[str, TimeRange]:
    """Return the parts of a step's time, in the order of this module's names; their sum is the step.

    `leaves_host`: whether messages along an axis go between hosts; `idle`: as for step_time()
    """
    low, high = (
        step_time(work, one, leaves_host=leaves_host, idle=idle) for one in (speeds.best, speeds.worst)
    )
    return {name: TimeRange(low[name], high[name]) for name in low}


def step_time(
    work: StepWork, speeds: Speeds, *, leaves_host: Mapping[str, bool], idle: float = 0.0
) -> dict[str, float]:
    """Return the parts with these speeds. Messages and copies of the optimizer step have no computing beside
    them; copies go beside the optimizer itself.

    `idle`: what a stage of a pipeline waits, as a share of computing
    """
    compute_s = update_s = 0.0
    for one in work.on_device:
        seconds = speeds.operation_s(
            dtype=one.dtype, flops=one.flops, moved_bytes=one.moved_bytes, number=one.num_kernels
        )
        if one.is_update:
            update_s += seconds
        else:
            compute_s += seconds
    update_s += speeds.update_s(work.host_bytes)
    beside_s = in_update_s = 0.0
    for sent in work.sent:
        number, in_update = dict(sent.number), dict(sent.update_kinds)
        for kind, num_bytes in sent.kinds:
            seconds = speeds.message_s(
                kind, num_bytes, number.get(kind, 0), leaves_host=leaves_host[sent.axis]
            )
            share = in_update.get(kind, 0) / num_bytes if num_bytes else 0.0
            in_update_s += share * seconds
            beside_s += (1 - share) * seconds
    in_update_bytes = dict(work.update_copied_bytes)
    copies = [(way, num_bytes, in_update_bytes.get(way, 0)) for way, num_bytes in work.copied_bytes]
    copied_s = sum(speeds.copy_s(way, num_bytes - part) for way, num_bytes, part in copies)
    copied_in_update_s = sum(speeds.copy_s(way, part) for way, _, part in copies)
    hidden = speeds.hidden
    return {
        COMPUTE: compute_s,
        COMMUNICATION: max(0.0, beside_s - hidden * compute_s) + in_update_s,
        OPTIMIZER: update_s,
        OFFLOAD: max(0.0, copied_s - hidden * compute_s) + max(0.0, copied_in_update_s - hidden * update_s),
        BUBBLE: compute_s * idle,
    }


def whole_step(parts: Mapping[str, TimeRange]) -> TimeRange:
    """Return the time of all parts together."""
    found = _NO_TIME
    for one in parts.values():
        found = found.plus(one)
    return found


def slowest(times: Sequence[Mapping[str, TimeRange]]) -> Mapping[str, TimeRange]:
    """Return the parts of the kind of rank whose step is the longest."""
    return max(times, key=lambda parts: sum(whole_step(parts)))


def shown_seconds(seconds: float) -> str:
    """Write a short time with three digits: `0.427 ms`, `1.5 s`."""
    factor, unit = (1e3, "ms") if seconds < 1 else (1, "s")
    return f"{seconds * factor:.3g} {unit}" if seconds else "-"


def shown_range(time: TimeRange) -> str:
    """Write a time, or its bounds with two digits in the unit of the greater one: `0.43 to 1.9 ms`."""
    if time.is_number:
        return shown_seconds(time.high)
    factor, unit = (1e3, "ms") if time.high < 1 else (1, "s")
    low, high = (f"{float(f'{one * factor:.2g}'):g}" for one in time)
    return f"{low} to {high} {unit}"


def _times(time: TimeRange, factor: float) -> TimeRange:
    return TimeRange(time.low * factor, time.high * factor)
