"""Lion over flat shards: one read of every array, one write of every result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .compiled import _C
from .shard import HostArray, Segment, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class LionSegment(Segment):
    """See `Segment`; Lion does not count steps."""

    beta1: float
    beta2: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LionShard(Shard):
    """See `Shard`; the moment is [n] float32 or bfloat16."""

    exp_avg: HostArray
    segments: Iterable[LionSegment]


def lion_step(shards: Iterable[LionShard], *, grad_scale: float = 1.0, num_threads: int = 0) -> None:
    """Apply one step of Lion; see [Note: a step] in shard.py.

    The sign of 0 is 0; that of NaN is NaN, so that a broken gradient shows in the parameter.

    Source:  Chen et al. 2023, "Symbolic discovery of optimization algorithms", arXiv 2302.06675, program 1
    """
    _C.lion_step(shards, grad_scale=grad_scale, num_threads=num_threads)


def lion_step_reference(shards: Iterable[LionShard], *, grad_scale: float = 1.0) -> None:
    """Do what `lion_step` does in one plain loop: the two agree bit for bit."""
    _C.lion_step_reference(shards, grad_scale=grad_scale)
