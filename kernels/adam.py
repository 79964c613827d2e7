"""Adam and AdamW over flat shards: one read of every array, one write of every result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .compiled import _C
from .shard import HostArray, Segment, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSegment(Segment):
    """See `Segment`."""

    beta1: float
    beta2: float
    eps: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamShard(Shard):
    """See `Shard`; the moments are [n] float32, or both bfloat16."""

    exp_avg: HostArray
    exp_avg_sq: HostArray
    segments: Iterable[AdamSegment]


def adamw_step(
    shards: Iterable[AdamShard],
    *,
    grad_scale: float = 1.0,
    adam_w_mode: bool = True,
    num_threads: int = 0,
) -> None:
    """Apply one step of AdamW; see [Note: a step] in shard.py.

    `adam_w_mode` decays the parameter itself; without it the decay is added to the gradient (Adam).

    Source:  torch.optim.AdamW and Adam (amsgrad and maximize off), same formula with the step counted from 1
    """
    _C.adamw_step(shards, grad_scale=grad_scale, adam_w_mode=adam_w_mode, num_threads=num_threads)


def adamw_step_reference(
    shards: Iterable[AdamShard], *, grad_scale: float = 1.0, adam_w_mode: bool = True
) -> None:
    """Do what `adamw_step` does in one plain loop: the two agree bit for bit."""
    _C.adamw_step_reference(shards, grad_scale=grad_scale, adam_w_mode=adam_w_mode)
