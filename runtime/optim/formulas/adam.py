"""AdamW, and Adam with L2 weight decay."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....kernels import AdamSegment, AdamShard, adamw_step
from ..numbers import as_float
from .formula import FlatArrays, Formula, Group, Pieces, Run, copy_out

# Both corrections are 1 - beta^step: after so many steps beta^step is 0 for every beta below 1, so they are exactly 1.
_ALL_STEPS = 2**62
_Hyper = tuple[float, float, float, float, float]


class AdamFormula(Formula):
    """Adam as `torch.optim.AdamW` and `Adam` do it; without bias correction where a group's `bias_correction` is false."""

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, *, adam_w_mode: bool) -> None:
        self.adam_w_mode = adam_w_mode

    def update_in_host_memory(self, arrays: Sequence[FlatArrays], *, grad_scale: float = 1.0) -> None:
        """Update all in one call of our kernel, which knows float32 and bfloat16; float16 takes copies of the gradients."""
        segments: dict[tuple[int, ...], AdamSegment] = {}
        without: list[FlatArrays] = []
        shards = []
        for one in arrays:
            param_out = one.param_out
            if param_out is not None and param_out.dtype is torch.float16:
                without.append(one)
                param_out = None
            shards.append(
                AdamShard(
                    param=one.param,
                    grads=[
                        (offset, grad.float() if grad.dtype is torch.float16 else grad)
                        for offset, grad in one.grads
                    ],
                    exp_avg=one.states["exp_avg"],
                    exp_avg_sq=one.states["exp_avg_sq"],
                    segments=[_known(run, segments) for run in one.runs],
                    param_out=param_out,
                )
            )
        adamw_step(shards, grad_scale=grad_scale, adam_w_mode=self.adam_w_mode)
        copy_out(without)

    def foreach(self, pieces: Pieces) -> None:
        """Call torch's fused kernel."""
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        lr, beta1, beta2, eps, weight_decay = _hyper(pieces.group)
        device = pieces.params[0].device
        count = torch.tensor(float(_step(pieces.group, pieces.step)), device=device)
        kernel(
            pieces.params,
            pieces.grads,
            pieces.states["exp_avg"],
            pieces.states["exp_avg_sq"],
            [],
            [count] * len(pieces.params),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )


def _step(group: Group, step: int) -> int:
    return step if group.get("bias_correction", True) else _ALL_STEPS


def _hyper(group: Group) -> _Hyper:
    beta1, beta2 = group["betas"]
    return (
        as_float(group["lr"]),
        as_float(beta1),
        as_float(beta2),
        as_float(group["eps"]),
        as_float(group["weight_decay"]),
    )


def _known(run: Run, made: dict[tuple[int, ...], AdamSegment]) -> AdamSegment:
    """The run as the kernel wants it; models have many parameters of few sizes."""
    key = (id(run.group), run.offset, run.numel, run.step)
    if key not in made:
        lr, beta1, beta2, eps, weight_decay = _hyper(run.group)
        made[key] = AdamSegment(
            offset=run.offset,
            numel=run.numel,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            step=_step(run.group, run.step),
        )
    return made[key]
