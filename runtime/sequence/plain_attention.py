"""Attention of the plain run of `dslaunch numerics`: every rank computes all heads of whole sequences, by two
collectives of torch, and keeps its part of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Whole(torch.autograd.Function):
    """The parts of all ranks, in their order, along a dimension."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.length = group, dim, part.shape[dim]
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.narrow(ctx.dim, dist.get_rank(ctx.group) * ctx.length, ctx.length), None, None


def attend_on_wholes(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    parts: tuple[Tensor, Tensor, Tensor],
    group: Any,
    *,
    dim: int,
    result_dim: int,
) -> Tensor:
    """Return this rank's part of the attention's result; `dim` and `result_dim` are the sequence's.

    Order: a collective, in forward and backward
    """
    query, key, value = (_Whole.apply(one.contiguous(), group, dim) for one in parts)  # type: ignore[no-untyped-call]
    length = parts[0].shape[dim]
    return attend(query, key, value).narrow(result_dim, dist.get_rank(group) * length, length)
