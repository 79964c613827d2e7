"""Common part of the shards and steps of every optimizer.

Arrays are torch CPU tensors, numpy arrays or anything else that exports
its memory through DLPack.

[Note: a step]
Every `*_step` updates `param` and the states of all shards in place and
writes `param_out` where it is given. `grad_scale` is multiplied into
the gradient first: 1 / loss scale times the clip factor. All arithmetic
is float32; values stored as 16 bits are rounded once, to nearest even
or, where a segment has a seed, by random bits.
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
from dataclasses import dataclass, fields
from typing import Generic, Protocol, TypeVar

from .compiled import _C


class HostArray(Protocol):
    """Memory that can be borrowed: `torch.Tensor`, `numpy.ndarray` and others."""

    def __dlpack__(self) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The elements [offset, offset + numel) of a shard; subclasses add the hyper-parameters of
    their optimizer group.

    With a `seed` of 32 bits, another in each step, bfloat16 parameters and states are rounded by
    random bits, which depend on it and on the element's place in its parameter alone; the place
    of this segment's first element is `first`. See kernels/random_bits.h.
    Units: elements; a step counts from 1
    """

    offset: int
    numel: int
    lr: float
    weight_decay: float
    seed: int | None = None  # None: states are rounded to nearest
    first: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The arrays of one flat shard, or of one parameter: the same n elements in each;
    subclasses add the states.

    Shapes: [n] each, contiguous, host memory. `param` is float32, or bfloat16 where all segments have a
            seed (LAMB: float32). `grads` is the gradient in pieces that
            follow one another: where each begins, and its elements, float32, bfloat16 or float16.
            `param_out`, of any of the three dtypes, takes a copy of the result; of a bfloat16
            parameter it is bfloat16. States are float32, or all
            bfloat16, whose 8 bits lose what is added to a state 256 times as large, unless the segment has
            a seed. Adam's may be uint8, codes of 8 bits as kernels/eight_bits.h describes them; `scales`
            then has an array of [ceil(n / 256)] float32 for each state, segments have seeds, and begin
            at multiples of 256. A tensor that requires
            grad must be passed as its `.detach()`.
    """

    param: HostArray
    grads: Iterable[tuple[int, HostArray]]
    param_out: HostArray | None = None
    scales: Iterable[HostArray] = ()


PLACES = ("offset", "numel", "seed", "first")  # fields of a segment that are no hyper-parameters

AnyShard = TypeVar("AnyShard", bound=Shard)


class Kernel(Generic[AnyShard]):
    """The compiled step of one optimizer, and the fields of its classes,
    which are those that its header reads.

    `name` is that in kernels/<name>.h; kernels/cuda/<name>.cu is its kernel on a device.
    `mode` is what the header says.
    """

    def __init__(
        self, name: str, shard: type[AnyShard], segment: type[Segment], *, has_eight_bits: bool = False
    ) -> None:
        self.name = name
        self.has_eight_bits = has_eight_bits  # states may be uint8
        self.shard = shard
        self.segment = segment
        common = {"segments", "update", *(field.name for field in fields(Shard))}
        states = [field for field in fields(shard) if field.name not in common]
        self.states = tuple(field.name for field in states)
        self.may_lack_states = any("None" in str(field.type) for field in states)
        self.has_update = "update" in shard.__dataclass_fields__
        self.counts_steps = "step" in segment.__dataclass_fields__
        self.numbers = tuple(field for field in fields(segment) if field.name not in PLACES)

    def step(
        self, shards: Iterable[AnyShard], *, grad_scale: float = 1.0, mode: int = 0, num_threads: int = 0
    ) -> None:
        """Apply one step; see [Note: a step]."""
        _C.step(self.name, shards, grad_scale=grad_scale, mode=mode, num_threads=num_threads)

    def step_reference(self, shards: Iterable[AnyShard], *, grad_scale: float = 1.0, mode: int = 0) -> None:
        """Do what `step` does in one plain loop: the two agree bit for bit."""
        _C.step_reference(self.name, shards, grad_scale=grad_scale, mode=mode)
