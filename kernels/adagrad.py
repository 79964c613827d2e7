"""Adagrad over flat shards: one read of every array, one write of every result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .compiled import _C
from .shard import HostArray, Segment, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class AdagradSegment(Segment):
    """See `Segment`."""

    lr_decay: float
    eps: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdagradShard(Shard):
    """See `Shard`; `sum`, of the squares of all gradients so far, is [n] float32 or bfloat16."""

    sum: HostArray
    segments: Iterable[AdagradSegment]


def adagrad_step(shards: Iterable[AdagradShard], *, grad_scale: float = 1.0, num_threads: int = 0) -> None:
    """Apply one step of Adagrad; see [Note: a step] in shard.py.

    Source:  torch.optim.Adagrad (maximize off), same formula with the step counted from 1
    """
    _C.adagrad_step(shards, grad_scale=grad_scale, num_threads=num_threads)


def adagrad_step_reference(shards: Iterable[AdagradShard], *, grad_scale: float = 1.0) -> None:
    """Do what `adagrad_step` does in one plain loop: the two agree bit for bit."""
    _C.adagrad_step_reference(shards, grad_scale=grad_scale)
