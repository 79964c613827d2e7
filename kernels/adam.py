"""AdamW over flat shards: one read of every array, one write of every result.

n is the number of elements of the shard. Arrays are torch CPU tensors, numpy arrays or anything else that exports
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


def adamw_step(  # noqa: PLR0913 - five arrays of one step; a class around them would live for one call
    param: HostArray,
    grad: HostArray,
    exp_avg: HostArray,
    exp_avg_sq: HostArray,
    segments: Iterable[AdamSegment],
    *,
    grad_scale: float = 1.0,
    adam_w_mode: bool = True,
    param_out: HostArray | None = None,
    num_threads: int = 0,
) -> None:
    """Update `param`, `exp_avg` and `exp_avg_sq` in place by one optimizer step; copy the result to `param_out`.

    `grad_scale` is multiplied into the gradient first: 1 / loss scale times the clip factor. `adam_w_mode` decays
    the parameter itself (AdamW); without it the decay is added to the gradient (Adam). Elements outside every
    segment are left as they are, in `param_out` too. The result has the same bits for every vector width and every
    `num_threads` (0: OpenMP's default). The GIL is released. Autograd does not see the writes.

    Shapes:  [n] float32, contiguous, host memory; grad may be bfloat16; param_out [n] bfloat16, rounded to nearest
             even. No two arrays share memory; a tensor that requires grad must be passed as its `.detach()`.
    Errors:  TypeError for an object that is no array, or a dtype not named above
             ValueError if lengths differ; if an array is not flat, contiguous, writable where written and in host
             memory; if a segment leaves the shard, overlaps another or has a hyper-parameter out of range
    Source:  torch.optim.AdamW and Adam (amsgrad and maximize off), same formula with the step counted from 1
    """
    _adamw_step(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        segments,
        grad_scale=grad_scale,
        adam_w_mode=adam_w_mode,
        param_out=param_out,
        num_threads=num_threads,
    )


def adamw_step_reference(
    param: HostArray,
    grad: HostArray,
    exp_avg: HostArray,
    exp_avg_sq: HostArray,
    segments: Iterable[AdamSegment],
    *,
    grad_scale: float = 1.0,
    adam_w_mode: bool = True,
    param_out: HostArray | None = None,
) -> None:
    """Do what `adamw_step` does in one plain loop: the two agree bit for bit."""
    _adamw_step_reference(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        segments,
        grad_scale=grad_scale,
        adam_w_mode=adam_w_mode,
        param_out=param_out,
    )


def squared_norm(grad: HostArray, num_threads: int = 0) -> float:
    """Return the sum of squares of `grad` in float64; infinities and NaN come through.

    The additions have a fixed order, so the result has the same bits for every `num_threads`.

    Shapes:  [n] float32 or bfloat16, contiguous, host memory
    Errors:  as `adamw_step`
    """
    return _squared_norm(grad, num_threads=num_threads)
