"""What the shards of every optimizer have in common.

Arrays are torch CPU tensors, numpy arrays or anything else that exports
its memory through DLPack.

[Note: a step]
Every `*_step` updates `param` and the states of all shards in place and
writes `param_out` where it is given. `grad_scale` is multiplied into
the gradient first: 1 / loss scale times the clip factor. All arithmetic
is float32; what is stored as 16 bits is rounded once, to nearest even.
Elements outside every segment, or without a gradient, are left as they
are, in every array. The result has the same bits for every vector width
and every `num_threads` (0: OpenMP's default). The GIL is released.
Autograd does not see the writes.

Errors:  TypeError for an object that is no array, or a dtype not named
         in the shard's class
         ValueError if lengths differ; if an array is not flat,
         contiguous, writable where written and in host memory, or
         shares memory with another; if a segment leaves the shard,
         overlaps another or has a hyper-parameter out of range. Nothing
         is written then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class HostArray(Protocol):
    """Memory that can be borrowed: `torch.Tensor`, `numpy.ndarray` and others."""

    def __dlpack__(self) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The elements [offset, offset + numel) of a shard; subclasses add the hyper-parameters of their optimizer group.

    Units: elements; a step counts from 1
    """

    offset: int
    numel: int
    lr: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The arrays of one flat shard, or of one parameter: the same n elements in each; subclasses add the states.

    Shapes: [n] each, contiguous, host memory. `param` is float32. `grads` is the gradient in pieces that follow one
            another: where each begins, and its elements, float32, bfloat16 or float16. `param_out`, of any of the three
            dtypes, takes a copy of the result. States are float32, or all bfloat16, whose 8 bits lose what is added to a
            state 256 times as large. A tensor that requires grad must be passed as its `.detach()`.
    """

    param: HostArray
    grads: Iterable[tuple[int, HostArray]]
    param_out: HostArray | None = None
