"""The element-wise optimizers over flat shards: one read of every array, one write of every result.

Of each, the fields of its segments and shards, as its header reads them, and its steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .shard import HostArray, Kernel, Segment, Shard

__all__ = [
    "ADAGRAD",
    "ADAM",
    "LION",
    "SGD",
    "AdagradSegment",
    "AdagradShard",
    "AdamSegment",
    "AdamShard",
    "LionSegment",
    "LionShard",
    "SgdSegment",
    "SgdShard",
    "adagrad_step",
    "adagrad_step_reference",
    "adamw_step",
    "adamw_step_reference",
    "lion_step",
    "lion_step_reference",
    "sgd_step",
    "sgd_step_reference",
]


# ---- Adam (mode 0) and AdamW (mode 1), whose weight decay is the parameter's own and not the gradient's.
# Source:  torch.optim.AdamW and Adam (amsgrad and maximize off), same formula with the step counted from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSegment(Segment):
    """See `Segment`."""

    beta1: float
    beta2: float
    eps: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamShard(Shard):
    """See `Shard`; the moments are [n] float32, both bfloat16, or both uint8."""

    exp_avg: HostArray
    exp_avg_sq: HostArray
    segments: Iterable[AdamSegment]


ADAM = Kernel("Adam", AdamShard, AdamSegment, has_eight_bits=True)


def adamw_step(
    shards: Iterable[AdamShard],
    *,
    grad_scale: float = 1.0,
    adam_w_mode: bool = True,
    num_threads: int = 0,
) -> None:
    """Apply one step of AdamW, or of Adam without `adam_w_mode`; see [Note: a step] in shard.py."""
    ADAM.step(shards, grad_scale=grad_scale, mode=int(adam_w_mode), num_threads=num_threads)


def adamw_step_reference(
    shards: Iterable[AdamShard], *, grad_scale: float = 1.0, adam_w_mode: bool = True
) -> None:
    """Do what `adamw_step` does in one plain loop: the two agree bit for bit."""
    ADAM.step_reference(shards, grad_scale=grad_scale, mode=int(adam_w_mode))


# ---- Lion. The sign of 0 is 0; that of NaN is NaN, so that a broken gradient shows in the parameter.
# Source:  Chen et al. 2023, "Symbolic discovery of optimization algorithms", arXiv 2302.06675, program 1


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


LION = Kernel("Lion", LionShard, LionSegment)
lion_step, lion_step_reference = LION.step, LION.step_reference


# ---- Adagrad.
# Source:  torch.optim.Adagrad (maximize off), same formula with the step counted from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdagradSegment(Segment):
    """See `Segment`."""

    lr_decay: float = 0.0
    eps: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdagradShard(Shard):
    """See `Shard`; `sum`, of the squares of all gradients so far, is [n] float32 or bfloat16."""

    sum: HostArray
    segments: Iterable[AdagradSegment]


ADAGRAD = Kernel("Adagrad", AdagradShard, AdagradSegment)
adagrad_step, adagrad_step_reference = ADAGRAD.step, ADAGRAD.step_reference


# ---- SGD, whose hyper-parameters say whether there is momentum.
# Source:  torch.optim.SGD (maximize off), whose buffer after the first step is the
#          gradient, without dampening


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


SGD = Kernel("Sgd", SgdShard, SgdSegment)
sgd_step, sgd_step_reference = SGD.step, SGD.step_reference
