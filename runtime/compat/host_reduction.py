"""Reductions of tensors in host memory that gloo has not in every version of torch since 2.6: AVG,
and reduce_scatter.

See "How gloo reduces" in collectives.py: what a rank is to reduce is sent to it, and added up in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce as fold
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError

_COMBINE: tuple[tuple[Any, Callable[[Tensor, Tensor], Tensor]], ...] = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.AVG, torch.add),  # divided in the end
    (dist.ReduceOp.PRODUCT, torch.mul),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.BAND, torch.bitwise_and),
    (dist.ReduceOp.BOR, torch.bitwise_or),
    (dist.ReduceOp.BXOR, torch.bitwise_xor),
)
_IN_FP32 = (torch.bfloat16, torch.float16)


def is_torchs(tensor: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether torch is to do it: of a GPU's tensor, or for a rank outside of the group,
    which it warns and leaves alone.
    """
    return tensor.is_cuda or dist.get_rank(group) < 0


def is_average(op: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether this is the average of tensors in host memory, for which SUM and a division stand.

    Errors: ConfigError if they are integers
    """
    if op != dist.ReduceOp.AVG or is_torchs(tensor, group):
        return False
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(
            f"ReduceOp.AVG of {tensor.dtype}: the average of integers is none; take SUM, or convert it"
        )
    return True


@torch.no_grad()
def reduce_scatter(
    output: Tensor, inputs: Sequence[Tensor], *, op: Any, group: dist.ProcessGroup | None, async_op: bool
) -> Followed:
    """Reduce `inputs[r]` of all ranks into rank r's `output`; 16-bit numbers in float32, rounded once.

    Shapes: `inputs[r]` as rank r's `output`, in any strides; one for each rank of the group
    Errors: ConfigError for an op that there is not, or other inputs
    """
    is_average(op, output, group)
    combine = next((function for known, function in _COMBINE if op == known), None)
    if combine is None:
        raise ConfigError(f"reduce_scatter(op={op}): must be SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR")
    size = dist.get_world_size(group)
    if len(inputs) != size:
        raise ConfigError(
            f"reduce_scatter() of {len(inputs)} inputs: must be {size}, one for each rank of the group"
        )
    own = inputs[dist.get_rank(group)]
    if own.shape != output.shape or any(one.dtype != output.dtype for one in inputs):
        raise ConfigError(
            f"reduce_scatter() into {tuple(output.shape)} of {output.dtype}: this rank's input "
            f"is {tuple(own.shape)} of {own.dtype}; give all the dtype of the output, and each "
            "the shape of its rank's"
        )
    sent = torch.cat([one.reshape(-1) for one in inputs])
    received = output.new_empty(size * output.numel())
    work = dist.all_to_all_single(
        received,
        sent,
        [output.numel()] * size,
        [one.numel() for one in inputs],
        group=group,
        async_op=async_op,
    )

    @torch.no_grad()
    def finish() -> None:
        parts = received.view(size, *output.shape)
        if output.dtype in _IN_FP32:
            parts = parts.float()
        total = fold(combine, parts.unbind())
        output.copy_(total / size if op == dist.ReduceOp.AVG else total)

    return Followed(work, finish)


@torch.no_grad()
def all_to_all(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, group: dist.ProcessGroup | None, async_op: bool
) -> Followed:
    """Send `inputs[r]` to rank r, and receive `outputs[r]` from it; one dtype for all."""
    sent = torch.cat([one.reshape(-1) for one in inputs])
    received = sent.new_empty(sum(one.numel() for one in outputs))
    sizes = [one.numel() for one in outputs]
    work = dist.all_to_all_single(
        received, sent, sizes, [one.numel() for one in inputs], group=group, async_op=async_op
    )

    @torch.no_grad()
    def finish() -> None:
        for output, part in zip(outputs, torch.split(received, sizes), strict=True):
            output.copy_(part.view(output.shape))

    return Followed(work, finish)


class Work(Protocol):
    """Result of a collective with `async_op=True`, torch's own or one of these."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Block (NCCL: make the current stream wait) until the result is in place."""

    def is_completed(self) -> bool:
        """Whether nothing is to wait for."""


class Followed:
    """A collective of torch's, and this rank's work after it, which the first wait() does."""

    def __init__(self, work: dist.Work | None, finish: Callable[[], None]) -> None:
        """Follow `work`; None: it is done, and `finish` is, too."""
        self._work = work
        self._finish: Callable[[], None] | None = finish
        if work is None:
            self._follow()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the result is in place. A `timeout` of 0 is the group's."""
        if self._work is not None:
            self._work.wait(timeout)
        self._follow()
        return True

    def is_completed(self) -> bool:
        """Whether wait() has been here."""
        return self._finish is None

    def _follow(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Together:
    """Several, waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = tuple(works)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until all results are in place. A `timeout` of 0 is the group's, for each."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all are."""
        return all(work.is_completed() for work in self._works)
