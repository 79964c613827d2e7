"""SGD over flat shards: one read of every array, one write of every result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .compiled import _C
from .shard import HostArray, Segment, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdSegment(Segment):
    """See `Segment`; `nesterov` needs momentum above 0 and dampening 0."""

    momentum: float
    dampening: float
    nesterov: bool
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdShard(Shard):
    """See `Shard`; `momentum_buffer` is [n] float32 or bfloat16 and holds zeros before step 1.

    A segment with momentum 0 does not touch it; if all are such, it may be None.
    """

    momentum_buffer: HostArray | None
    segments: Iterable[SgdSegment]


def sgd_step(shards: Iterable[SgdShard], *, grad_scale: float = 1.0, num_threads: int = 0) -> None:
    """Apply one step of SGD; see [Note: a step] in shard.py.

    Source:  torch.optim.SGD (maximize off), whose buffer after the first step is the gradient, without dampening
    """
    _C.sgd_step(shards, grad_scale=grad_scale, num_threads=num_threads)


def sgd_step_reference(shards: Iterable[SgdShard], *, grad_scale: float = 1.0) -> None:
    """Do what `sgd_step` does in one plain loop: the two agree bit for bit."""
    _C.sgd_step_reference(shards, grad_scale=grad_scale)
