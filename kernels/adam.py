"""AdamW over flat shards: one read of every array, one write of every result.

Arrays are torch CPU tensors, numpy arrays or anything else that exports
its memory through DLPack.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

try:
    from ._C import (
        adamw_step as _adamw_step,
        adamw_step_reference as _adamw_step_reference,
        squared_norm as _squared_norm,
    )
except ImportError as error:
    raise ImportError(
        f"the compiled module dslaunch.kernels._C cannot be loaded ({error}); it comes with every installed "
        "dslaunch; in a checkout build it with `make setup`, or with "
        "`python -m pip install --no-build-isolation --editable .`"
    ) from error


class HostArray(Protocol):
    """Memory that can be borrowed: `torch.Tensor`, `numpy.ndarray` and others."""

    def __dlpack__(self) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSegment:
    """The elements [offset, offset + numel) of a shard and the hyper-parameters of their optimizer group.

    Units: elements; step counts from 1.
    """

    offset: int
    numel: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamShard:
    """The arrays of one flat shard, or of one parameter: the same n elements in each.

    Shapes: [n] float32, contiguous, host memory. `param_out` [n] bfloat16 takes a copy of the result, rounded to nearest
            even. `grads` is the gradient in pieces that follow one another: where each begins, and its elements, float32
            or bfloat16. A tensor that requires grad must be passed as its `.detach()`.
    """

    param: HostArray
    grads: Iterable[tuple[int, HostArray]]
    exp_avg: HostArray
    exp_avg_sq: HostArray
    segments: Iterable[AdamSegment]
    param_out: HostArray | None = None


def adamw_step(
    shards: Iterable[AdamShard],
    *,
    grad_scale: float = 1.0,
    adam_w_mode: bool = True,
    num_threads: int = 0,
) -> None:
    """Update `param`, `exp_avg` and `exp_avg_sq` of all shards in place by one optimizer step; see `AdamShard.param_out`.

    `grad_scale` is multiplied into the gradient first: 1 / loss scale times the clip factor. `adam_w_mode` decays
    the parameter itself (AdamW); without it the decay is added to the gradient (Adam). Elements outside every
    segment, or without a gradient, are left as they are, in `param_out` too. The result has the same bits for every vector width and every
    `num_threads` (0: OpenMP's default). The GIL is released. Autograd does not see the writes.

    Errors:  TypeError for an object that is no array, or a dtype not named in `AdamShard`
             ValueError if lengths differ; if an array is not flat, contiguous, writable where written and in host
             memory, or shares memory with another; if a segment leaves the shard, overlaps another or has a
             hyper-parameter out of range. Nothing is written then.
    Source:  torch.optim.AdamW and Adam (amsgrad and maximize off), same formula with the step counted from 1
    """
    _adamw_step(shards, grad_scale=grad_scale, adam_w_mode=adam_w_mode, num_threads=num_threads)


def adamw_step_reference(
    shards: Iterable[AdamShard], *, grad_scale: float = 1.0, adam_w_mode: bool = True
) -> None:
    """Do what `adamw_step` does in one plain loop: the two agree bit for bit."""
    _adamw_step_reference(shards, grad_scale=grad_scale, adam_w_mode=adam_w_mode)


def squared_norm(grads: Iterable[HostArray], num_threads: int = 0) -> float:
    """Return the sum of squares of all these gradients in float64; infinities and NaN come through.

    The additions have a fixed order, so the result has the same bits for every `num_threads`.

    Shapes:  [n] float32 or bfloat16, contiguous, host memory; each its own n
    Errors:  as `adamw_step`
    """
    return _squared_norm(grads, num_threads=num_threads)
