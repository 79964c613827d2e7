"""Adam and AdamW over a flat shard: the fused kernel of dslaunch in host memory, torch's fused one on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import AdamSegment, adamw_step
from .rule import Shard, as_float, copy_out, runs, scaled_grad


class AdamRule:
    """AdamW, or Adam with L2 weight decay where `adam_w_mode` is false."""

    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, *, adam_w_mode: bool) -> None:
        self.adam_w_mode = adam_w_mode
        self.name = "AdamW" if adam_w_mode else "Adam"

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
        if shard.master.is_cuda:
            self.update_with_torch(shard, states, groups, step=step, grad_scale=grad_scale)
            return
        is_half = torch.float16 in (
            shard.grad.dtype,
            None if shard.param_out is None else shard.param_out.dtype,
        )
        adamw_step(
            shard.master,
            shard.grad.float() if is_half else shard.grad,  # the kernel knows float32 and bfloat16
            states["exp_avg"],
            states["exp_avg_sq"],
            [
                _segment(segment.offset, segment.numel, groups[segment.group], step)
                for segment in shard.segments
            ],
            grad_scale=grad_scale,
            adam_w_mode=self.adam_w_mode,
            param_out=None if is_half else shard.param_out,
        )
        if is_half:
            copy_out(shard)

    def update_with_torch(
        self,
        shard: Shard,
        states: Mapping[str, Tensor],
        groups: Sequence[Mapping[str, Any]],
        *,
        step: int,
        grad_scale: float,
    ) -> None:
        """Apply one step with torch's fused kernel, on any device.

        It wants a gradient of the master's dtype, so a 16-bit one costs 4 more bytes per element for the moment.
        """
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        grad = scaled_grad(shard, grad_scale)
        for segment in shard.segments:
            group = groups[segment.group]
            one = (segment,)
            kernel(
                runs(shard.master, one),
                runs(grad, one),
                runs(states["exp_avg"], one),
                runs(states["exp_avg_sq"], one),
                [],
                [torch.tensor(float(step), device=grad.device)],
                lr=as_float(group["lr"]),
                beta1=as_float(group["betas"][0]),
                beta2=as_float(group["betas"][1]),
                weight_decay=as_float(group["weight_decay"]),
                eps=as_float(group["eps"]),
                amsgrad=False,
                maximize=False,
            )
        copy_out(shard)


def _segment(offset: int, numel: int, group: Mapping[str, Any], step: int) -> AdamSegment:
    beta1, beta2 = group["betas"]
    return AdamSegment(
        offset=offset,
        numel=numel,
        lr=as_float(group["lr"]),
        beta1=as_float(beta1),
        beta2=as_float(beta2),
        eps=as_float(group["eps"]),
        weight_decay=as_float(group["weight_decay"]),
        step=step,
    )
