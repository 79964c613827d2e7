"""The optimizer steps and the norm for arrays in the memory of a CUDA device.

No torch: arrays arrive through DLPack.

Kernels are compiled at first use for the chip that is there, and kept on the disk; see compiler.py.

[Note: a step on a device]
Steps are those of [Note: a step] in kernels/shard.py, with every array on one CUDA device, which must be the
current one. A step has the bits of the CPU's, NaN aside. It is queued on `stream` (a `cudaStream_t` as an
int; 0 is the default stream) and returns at once; `stream` must already wait for whatever writes the arrays.
Several shards become one launch: 64 runs of elements fit in 4 KiB of kernel parameters, 512 in the 32 KiB of
drivers from CUDA 12.1 on, and each combination of dtypes is a launch of its own.

`device_scale` is one float32 on the device that is multiplied into the gradient beside `grad_scale`, such as
a clip factor that was computed there: the host does not wait for it. Where it is infinite or NaN nothing is
written, which skips a step that overflowed.

Errors:  as [Note: a step], and CudaUnavailable if the kernels cannot be compiled or loaded here
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..lamb import LAMB, LambShard
from ..shard import AnyShard, HostArray as Array, Kernel
from . import lamb, norm, steps
from .errors import CudaUnavailable
from .shards import Rule

__all__ = [
    "NORM_OUT_NUMEL",
    "CudaUnavailable",
    "lamb_step",
    "squared_norm",
    "step",
]

NORM_OUT_NUMEL = norm.OUT_NUMEL


def step(
    kernel: Kernel[AnyShard],
    shards: Iterable[AnyShard],
    *,
    grad_scale: float = 1.0,
    mode: int = 0,
    stream: int,
    device_scale: Array | None = None,
) -> None:
    """Queue one step of an element-wise optimizer; see [Note: a step on a device]."""
    rule = Rule(kernel=kernel, grad_scale=steps.read_grad_scale(grad_scale), mode=mode)
    steps.step(shards, rule, device_scale=device_scale, stream=stream)


def lamb_step(
    shards: Iterable[LambShard],
    *,
    grad_scale: float = 1.0,
    eps_inside_sqrt: bool = False,
    bias_correction: bool = True,
    allocate: Callable[[int], Array],
    stream: int,
    device_scale: Array | None = None,
) -> None:
    """Queue one step of LAMB, whose parameters lie in one segment each; see [Note: a step on a device].

    `allocate(n)` is called once, for [n] float64 on the device that must stay until the stream is done
    with them. The first two of each segment are its sums then, as `LambSums` has them and with the
    bits of the CPU's.

    Errors:  ValueError, too, if a segment's gradient comes in several pieces
    """
    scale = steps.read_grad_scale(grad_scale)
    rule = Rule(kernel=LAMB, grad_scale=scale, mode=int(eps_inside_sqrt))
    lamb.step(
        shards,
        rule,
        bias_correction=bias_correction,
        device_scale=device_scale,
        allocate=allocate,
        stream=stream,
    )


def squared_norm(grads: Iterable[Array], *, out: Array, stream: int) -> None:
    """Queue the sum of squares of all these gradients in float64, into `out[0]`;
    infinities and NaN come through.

    The order of additions depends on lengths and dtypes alone: the result has the same bits on every chip
    and at every address.

    Shapes:  grads [n] float32, bfloat16 or float16, each its own n; out [NORM_OUT_NUMEL] float64,
             scratch behind the first
    Errors:  as in [Note: a step on a device]
    """
    norm.squared_norm(grads, out=out, stream=stream)
