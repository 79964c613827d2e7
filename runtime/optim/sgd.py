"""Stochastic gradient descent over a flat shard, operation for operation as torch.optim.SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..zero.layout import Segment
from .rule import Shard, as_float, copy_out, runs, scaled_grad


class SgdRule:
    """SGD with momentum, dampening, Nesterov's look-ahead and L2 weight decay, each optional."""

    name = "SGD"

    def __init__(self, *, has_momentum: bool) -> None:
        self.state_names: tuple[str, ...] = ("momentum_buffer",) if has_momentum else ()

    def update(
        self,
        shard: Shard,
        states: Mapping[str, Tensor],
        groups: Sequence[Mapping[str, Any]],
        *,
        step: int,
        grad_scale: float,
    ) -> None:
        """Apply one step to the shard."""
        grad = scaled_grad(shard, grad_scale)
        for index, group in enumerate(groups):
            own = tuple(segment for segment in shard.segments if segment.group == index)
            if own:
                _update_group(shard.master, grad, states, own, group, is_first=step == 1)
        copy_out(shard)


def _update_group(
    master: Tensor,
    grad: Tensor,
    states: Mapping[str, Tensor],
    segments: Sequence[Segment],
    group: Mapping[str, Any],
    *,
    is_first: bool,
) -> None:
    params, updates = runs(master, segments), runs(grad, segments)
    weight_decay, momentum = as_float(group["weight_decay"]), as_float(group["momentum"])
    if weight_decay != 0.0:
        torch._foreach_add_(updates, params, alpha=weight_decay)
    if momentum != 0.0:
        if "momentum_buffer" not in states:
            raise ConfigError(
                f"SGD was made with momentum 0 and now has {momentum}; give it a momentum above 0 from the start, "
                "which a scheduler may then change"
            )
        buffers = runs(states["momentum_buffer"], segments)
        if is_first:
            torch._foreach_copy_(buffers, updates)  # torch starts without dampening
        else:
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, updates, alpha=1.0 - as_float(group["dampening"]))
        if group["nesterov"]:
            torch._foreach_add_(updates, buffers, alpha=momentum)
        else:
            updates = buffers
    torch._foreach_add_(params, updates, alpha=-as_float(group["lr"]))
