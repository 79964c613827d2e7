"""LAMB over flat shards, in two passes: the length of a step depends on the norms of a whole parameter.

A segment is one parameter. Where it lies in several shards or ranks, run
`lamb_directions`, add up the sums of its segments, and hand every
segment the total in `lamb_apply`; otherwise `lamb_step` is all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .compiled import _C
from .shard import HostArray, Kernel, Segment, Shard


class LambSums(NamedTuple):
    """Sums of squares in float64 over the elements of a segment that have a gradient."""

    param: float
    update: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LambSegment(Segment):
    """See `Segment`; the quotient of the norms, |param| / |update|, is kept in [min_coeff, max_coeff]."""

    beta1: float
    beta2: float
    eps: float
    step: int
    min_coeff: float = 0.01
    max_coeff: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LambShard(Shard):
    """See `Shard`; the moments are [n] float32, or both bfloat16.

    `update` [n] float32 is the direction between the two passes; what it held before does not matter.
    """

    exp_avg: HostArray
    exp_avg_sq: HostArray
    update: HostArray
    segments: Iterable[LambSegment]


LAMB = Kernel("Lamb", LambShard, LambSegment)


def lamb_directions(
    shards: Iterable[LambShard],
    *,
    grad_scale: float = 1.0,
    eps_inside_sqrt: bool = False,
    num_threads: int = 0,
) -> list[LambSums]:
    """First pass: write the moments and `update`; return the sums of every segment, shard after shard.

    Otherwise as [Note: a step] in shard.py. The sums have the same bits for every `num_threads`, but another
    way to cut the gradient into pieces changes the last ones.

    Source:  You et al. 2020, "Large batch optimization for deep learning", arXiv 1904.00962, algorithm 2;
             clamp, `eps_inside_sqrt` and the place of the bias correction as DeepSpeed 0.19.8
             ops/lamb/fused_lamb.py, `FusedLamb`
    """
    sums = _C.lamb_directions(
        shards, grad_scale=grad_scale, eps_inside_sqrt=eps_inside_sqrt, num_threads=num_threads
    )
    return [LambSums(*of_segment) for of_segment in sums]


def lamb_apply(
    shards: Iterable[LambShard],
    sums: Sequence[tuple[float, float]],
    *,
    bias_correction: bool = True,
    num_threads: int = 0,
) -> None:
    """Second pass: param -= lr * quotient of the norms * `update`, with the sums of every segment,
    shard after shard.

    The quotient is 1 where either norm is 0. `bias_correction` is Adam's, as a factor of lr.

    Errors:  ValueError if there are not as many sums as segments; otherwise as [Note: a step] in shard.py
    """
    _C.lamb_apply(shards, sums, bias_correction=bias_correction, num_threads=num_threads)


def lamb_step(
    shards: Iterable[LambShard],
    *,
    grad_scale: float = 1.0,
    eps_inside_sqrt: bool = False,
    bias_correction: bool = True,
    num_threads: int = 0,
) -> list[LambSums]:
    """Apply one step of LAMB to parameters that lie in one segment each; return their sums."""
    shards = _kept(shards)
    sums = lamb_directions(
        shards, grad_scale=grad_scale, eps_inside_sqrt=eps_inside_sqrt, num_threads=num_threads
    )
    lamb_apply(shards, sums, bias_correction=bias_correction, num_threads=num_threads)
    return sums


def lamb_step_reference(
    shards: Iterable[LambShard],
    *,
    grad_scale: float = 1.0,
    eps_inside_sqrt: bool = False,
    bias_correction: bool = True,
) -> list[LambSums]:
    """Do what `lamb_step` does in plain loops: the two agree bit for bit."""
    shards = _kept(shards)
    sums = _C.lamb_directions_reference(shards, grad_scale=grad_scale, eps_inside_sqrt=eps_inside_sqrt)
    _C.lamb_apply_reference(shards, sums, bias_correction=bias_correction)
    return [LambSums(*of_segment) for of_segment in sums]


def _kept(shards: Iterable[LambShard]) -> list[LambShard]:
    """Return the shards as a list: both passes read all of them, and an iterator can be read once."""
    return [
        replace(shard, grads=tuple(shard.grads), segments=tuple(shard.segments))
        if isinstance(shard, LambShard)
        else shard
        for shard in shards
    ]
