"""The way of tokens to their experts and back: two all-to-alls, and as many in the backward.

A rank sends each expert either equally many slots (the expert's capacity; some may be empty), or exactly its
tokens for that expert. In the second case counts are sent first, for which the host waits once for its GPU.

Source: Lepikhin et al. 2020 (GShard), algorithm 2; DeepSpeed 0.19.8 moe/sharded_moe.py, `_AllToAll`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.rank_group import RankGroup

RESULTS = "results"  # results of experts, on their way back


class ExpertAxis:
    """This rank and those that hold the other experts of its layers.

    Order: all of them call the same methods in the same order, in forward and backward
    """

    def __init__(self, *, size: int, name: str = "experts") -> None:
        """`name` is the layer's, in messages."""
        self.size, self.name = size, name
        self._group: RankGroup | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertAxis:
        """A copy of a module has the same ranks."""
        return self

    @property
    def group(self) -> RankGroup:
        """The ranks, once an engine has made their process group."""
        if self._group is None:
            raise AssertionError(
                f"{self.name}: the layer computes before its engine is made; call initialize() first"
            )
        return self._group

    @property
    def has_group(self) -> bool:
        """True if an engine has made the group."""
        return self._group is not None

    @property
    def index(self) -> int:
        """This rank's place among them, which says which experts it holds."""
        return 0 if self.size == 1 else self.group.index

    def join(self, group: RankGroup) -> None:
        """Send along this group from now on."""
        self._group = group

    def largest(self, number: int | Tensor, device: torch.device) -> int:
        """Return the largest of the ranks' numbers: all have one that the host knows, or all a tensor []
        there.
        """
        if self.size == 1:
            return int(number)
        what = f"the capacity of {self.name}"
        if isinstance(number, int):
            return int(
                max(one for (one,) in self.group.all_gather_numbers([number], device=device, what=what))
            )
        value = number.clone()
        sent_bytes = 2 * value.nbytes * (self.size - 1) // self.size
        flight = self.group.begin("all_reduce", value, what, sent_bytes=sent_bytes)
        send = partial(dist.all_reduce, value, op=dist.ReduceOp.MAX, async_op=True)
        flight.start(partial(send, group=self.group.axis.group)).wait()
        with self.group.wire.recorder.waiting_for_device():
            return int(value)

    def exchange(self, rows: Tensor, *, sent: Sequence[int], received: Sequence[int], what: str) -> Tensor:
        """Return what the others have for this rank, in their order; its gradient goes the way back.

        Shapes: rows [sum of `sent`, ...] and [sum of `received`, ...]; one count for each rank
        """
        if torch.is_grad_enabled() and not rows.requires_grad and what == RESULTS:
            # frozen experts here: those of other ranks are trained, and all take part in the way back
            rows = rows.detach().requires_grad_()
        result: Tensor = _Exchange.apply(rows, self, tuple(sent), tuple(received), what)  # type: ignore[no-untyped-call]
        return result

    def send(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], what: str) -> Tensor:
        """Exchange rows as `exchange` does, without a gradient."""
        rows = rows.contiguous()
        row_bytes = rows[:1].nbytes if len(rows) else 0
        sent_bytes = (len(rows) - sent[self.index]) * row_bytes
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        group = self.group
        # None: each rank's size is another
        flight = group.begin("all_to_all", None, f"{what} of {self.name}", sent_bytes=sent_bytes)
        send = partial(dist.all_to_all_single, arrived, rows, list(received), list(sent))
        flight.start(partial(send, group=group.axis.group, async_op=True)).wait()
        return arrived


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, axis: ExpertAxis, sent: tuple[int, ...], received: tuple[int, ...], what: str
    ) -> Tensor:
        ctx.axis, ctx.sent, ctx.received, ctx.what = axis, sent, received, what
        return axis.send(rows, sent, received, what)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        back = ctx.axis.exchange(
            grad, sent=ctx.received, received=ctx.sent, what=f"the gradient of {ctx.what}"
        )
        return back, None, None, None, None


def through_slots(slots: Tensor, axis: ExpertAxis, experts: Callable[[Tensor], Tensor]) -> Tensor:
    """Send every expert its slots, and return what it makes of them.

    Shapes: slots [E, C, h], C the same on all ranks; `experts` gets [ranks, E / ranks, C, h], and returns
            that; the result is [E, C, h]
    """
    num_experts, capacity, width = slots.shape
    num_local = num_experts // axis.size
    sizes = [num_local] * axis.size
    if axis.size > 1:
        slots = axis.exchange(slots, sent=sizes, received=sizes, what="tokens")
    done = experts(slots.reshape(axis.size, num_local, capacity, width))
    done = done.reshape(num_experts, capacity, done.shape[-1])
    return axis.exchange(done, sent=sizes, received=sizes, what=RESULTS) if axis.size > 1 else done


def through_rows(
    tokens: Tensor,
    chosen: Tensor,
    axis: ExpertAxis,
    num_experts: int,
    experts: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Send every token to its experts, and return what each makes of it; no token is dropped, none padded.

    Shapes: tokens [S, h], chosen [S, k] int64; `experts` gets rows [n, h] in the order of this rank's
            experts and [E / ranks] int64, how many rows each has, and returns [n, h]; the result is [S, k, h]
    """
    num_tokens, k = chosen.shape
    order = chosen.reshape(-1).argsort(stable=True)  # sorted by expert, hence by rank
    rows = tokens[order // k]
    counts = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
    # bincount() would wait for the smallest and the largest of them
    counts.scatter_add_(0, chosen.reshape(-1), torch.ones_like(order))
    done = experts(rows, counts) if axis.size == 1 else _on_ranks(rows, counts, axis, experts)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return done[back].view(num_tokens, k, done.shape[-1])


def _on_ranks(
    rows: Tensor, counts: Tensor, axis: ExpertAxis, experts: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    num_local = len(counts) // axis.size
    sizes = [num_local] * axis.size
    theirs = axis.send(counts, sizes, sizes, "counts").view(axis.size, num_local)
    both = torch.stack([counts.view(axis.size, num_local), theirs]).sum(dim=2)
    with axis.group.wire.recorder.waiting_for_device():
        sent, received = both.tolist()
    arrived = axis.exchange(rows, sent=sent, received=received, what="tokens")
    # Rows arrive in order of ranks, and of experts within a rank; the experts want them by expert.
    number = torch.arange(num_local, device=rows.device).repeat(axis.size)
    numbers = number.repeat_interleave(theirs.reshape(-1), output_size=len(arrived))
    by_expert = numbers.argsort(stable=True)
    done = experts(arrived[by_expert], theirs.sum(dim=0))
    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(len(by_expert), device=rows.device)
    return axis.exchange(done[back], sent=received, received=sent, what=RESULTS)
