"""AdamW, and Adam with L2 weight decay."""

from __future__ import annotations

import torch

from ....kernels import AdamSegment, AdamShard, adamw_step, cuda
from ..numbers import as_float
from .formula import FlatArrays, Formula, Group, Pieces, Run, corrected_step

_Hyper = tuple[float, float, float, float, float]


class AdamFormula(Formula):
    """Adam as `torch.optim.AdamW` and `Adam` do it; without bias correction where a group's `bias_correction` is false."""

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, *, adam_w_mode: bool) -> None:
        self.adam_w_mode = adam_w_mode

    def segment(self, run: Run) -> AdamSegment:
        """As Adam's kernel takes it."""
        lr, beta1, beta2, eps, weight_decay = _hyper(run.group)
        return AdamSegment(
            offset=run.offset,
            numel=run.numel,
            lr=lr,
            weight_decay=weight_decay,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            step=corrected_step(run),
        )

    def shard(self, one: FlatArrays, segments: list[AdamSegment]) -> AdamShard:
        """As Adam's kernel takes it."""
        return AdamShard(
            param=one.param,
            grads=one.grads,
            param_out=one.param_out,
            exp_avg=one.states["exp_avg"],
            exp_avg_sq=one.states["exp_avg_sq"],
            segments=segments,
        )

    def call(self, shards: list[AdamShard], grad_scale: float) -> None:
        """AdamW or Adam."""
        adamw_step(shards, grad_scale=grad_scale, adam_w_mode=self.adam_w_mode)

    def call_on_device(self, shards: list[AdamShard], grad_scale: float, stream: int) -> None:
        """AdamW or Adam."""
        cuda.adamw_step(shards, grad_scale=grad_scale, adam_w_mode=self.adam_w_mode, stream=stream)

    def foreach(self, pieces: Pieces) -> None:
        """Call torch's fused kernel."""
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        lr, beta1, beta2, eps, weight_decay = _hyper(pieces.group)
        device = pieces.params[0].device
        count = torch.tensor(float(corrected_step(pieces)), device=device)
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


def _hyper(group: Group) -> _Hyper:
    beta1, beta2 = group["betas"]
    return (
        as_float(group["lr"]),
        as_float(beta1),
        as_float(beta2),
        as_float(group["eps"]),
        as_float(group["weight_decay"]),
    )
