"""Messages between the ranks along the axis tp in a forward and a backward.

Activations are either the same on all ranks, or each rank has a different part of the last dimension. If each
rank computes its own part from a value that is the same on all, the ranks' gradients of the value are added.

Source: Shoeybi et al. 2019 (Megatron-LM), figures 3 and 4: the functions f and g
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..comm.rank_group import RankGroup
from ..mesh.cut import cut_evenly
from ..zero.parameters.uncompiled import uncompiled

_ENTERED = "_dslaunch_entered"  # attribute of a tensor
_SMALLEST = 1e-20  # norms of gradients below this count as 0


class TensorAxis:
    """This rank and those that hold the other parts of its layers.

    Order: all of them call the same methods in the same order, in forward and backward
    """

    def __init__(self, *, size: int, index: int) -> None:
        self.size, self.index = size, index
        self._group: RankGroup | None = None
        # True while gradients of joined forward values are noted, and the sum of logarithms of their norms.
        self.notes_gradients = False
        self.log_norms: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorAxis:
        """Return the same axis: a copy of a module is divided over the same ranks."""
        return self

    @property
    def group(self) -> RankGroup:
        """The ranks, once an engine has made their process group."""
        if self._group is None:
            raise AssertionError("the model computes before its engine is made")
        return self._group

    def join(self, group: RankGroup) -> None:
        """Send along this group from now on."""
        self._group = group

    def sum(self, value: Tensor, what: str) -> Tensor:
        """Return the sum over the ranks, without a gradient of its own."""
        return self._all_reduce(value, what, dist.ReduceOp.SUM)

    def largest(self, value: Tensor, what: str) -> Tensor:
        """Return the largest of the ranks' values, element by element, without a gradient."""
        return self._all_reduce(value, what, dist.ReduceOp.MAX)

    def _all_reduce(self, value: Tensor, what: str, op: dist.ReduceOp.RedOpType) -> Tensor:
        total = value.clone(memory_format=torch.contiguous_format)
        axis = self.group.axis
        sent_bytes = 2 * total.nbytes // axis.size * (axis.size - 1)
        flight = self.group.begin("all_reduce", total, what, sent_bytes=sent_bytes)
        flight.start(partial(dist.all_reduce, total, op=op, group=axis.group, async_op=True)).wait()
        return total

    @uncompiled
    def enter(self, value: Tensor, what: str) -> Tensor:
        """Return the value, which is the same on all ranks and from which each computes its part. The ranks'
        gradients of it are added.

        A value that enters several layers one after the other, as those for queries, keys and values, is one
        tensor, so its gradients are added once.
        """
        if not (torch.is_grad_enabled() and value.requires_grad):
            return value
        known: tuple[TensorAxis, int, Tensor] | None = getattr(value, _ENTERED, None)
        if known is not None and known[0] is self and known[1] == value._version:
            return known[2]
        result: Tensor = _Enter.apply(value, self, what)  # type: ignore[no-untyped-call]
        # not for a parameter: it outlives the forward, and its memory may change
        if value.grad_fn is not None:
            setattr(value, _ENTERED, (self, value._version, result))
        return result

    @uncompiled
    def leave(self, value: Tensor, what: str) -> Tensor:
        """Return the sum of all ranks' values, the same on all."""
        result: Tensor = _Leave.apply(value, self, what)  # type: ignore[no-untyped-call]
        return result

    @uncompiled
    def gather(self, value: Tensor, size: int, what: str) -> Tensor:
        """Return all ranks' parts of the last dimension, which has `size` elements together."""
        result: Tensor = _Gather.apply(value, self, size, what)  # type: ignore[no-untyped-call]
        return result

    @uncompiled
    def split(self, value: Tensor, what: str) -> Tensor:
        """Return this rank's part of the last dimension of a value that is the same on all."""
        result: Tensor = _Split.apply(value, self, what)  # type: ignore[no-untyped-call]
        return result

    def note_gradient(self, grad: Tensor) -> None:
        """Note a backward's gradient for a value that is the same on all ranks: it must be the same, too."""
        norm = torch.linalg.vector_norm(grad, dtype=torch.float32).double().clamp(min=_SMALLEST).log()
        self.log_norms = norm if self.log_norms is None else self.log_norms + norm

    def part_of(self, value: Tensor) -> Tensor:
        """Return this rank's part of the last dimension."""
        (piece,) = cut_evenly(value.shape, -1, index=self.index, size=self.size).pieces
        return value.narrow(-1, piece.offset, piece.size).contiguous()

    def parts(self, value: Tensor, size: int, what: str) -> Tensor:
        """Return all ranks' parts of the last dimension put together."""
        runs = [cut_evenly((size,), 0, index=index, size=self.size).pieces[0] for index in range(self.size)]
        most = max(run.size for run in runs)
        sent = F.pad(value, (0, most - value.shape[-1])).contiguous()
        received = [torch.empty_like(sent) for _ in runs]
        axis = self.group.axis
        flight = self.group.begin("all_gather", None, what, sent_bytes=sent.nbytes * (axis.size - 1))
        flight.start(partial(dist.all_gather, received, sent, group=axis.group, async_op=True)).wait()
        return torch.cat([one[..., : run.size] for one, run in zip(received, runs, strict=True)], dim=-1)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: TensorAxis, what: str) -> Tensor:
        ctx.axis, ctx.what = axis, what
        # Not view_as(): a view has its base, which has the view as an attribute (see `enter`), and the two
        # would never be freed.
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.axis.sum(grad, f"the gradient of {ctx.what}"), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: TensorAxis, what: str) -> Tensor:
        ctx.axis, ctx.is_noted = axis, axis.notes_gradients
        return axis.sum(value, what)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.is_noted:
            ctx.axis.note_gradient(grad)
        return grad, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: TensorAxis, size: int, what: str) -> Tensor:
        ctx.axis, ctx.is_noted = axis, axis.notes_gradients
        return axis.parts(value, size, what)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.is_noted:
            ctx.axis.note_gradient(grad)
        return ctx.axis.part_of(grad), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: TensorAxis, what: str) -> Tensor:
        ctx.axis, ctx.what, ctx.size = axis, what, value.shape[-1]
        return axis.part_of(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.axis.parts(grad, ctx.size, f"the gradient of {ctx.what}"), None, None


def begins_parts(node: Any) -> bool:
    """Tell whether this node of a graph is where each rank begins to compute with its part of a value."""
    return isinstance(node, (_Enter._backward_cls, _Split._backward_cls))


def is_put_together(node: Any) -> bool:
    """Tell whether this node of a graph joins the ranks' parts into a value that is the same on all ranks."""
    return isinstance(node, (_Leave._backward_cls, _Gather._backward_cls))
