"""Lion: the sign of an average of gradients."""

from __future__ import annotations

import torch

from ....kernels import LionSegment, LionShard, cuda, lion_step
from ..numbers import as_float
from .formula import FlatArrays, Formula, Pieces, Run


class LionFormula(Formula):
    """Every element moves by lr, against the sign of beta1 * exp_avg + (1 - beta1) * grad; weight decay is decoupled.

    Source: Chen et al. 2023, "Symbolic discovery of optimization algorithms", arXiv 2302.06675, program 1
    """

    state_names = ("exp_avg",)

    def segment(self, run: Run) -> LionSegment:
        """As Lion's kernel takes it."""
        beta1, beta2 = run.group["betas"]
        return LionSegment(
            offset=run.offset,
            numel=run.numel,
            lr=as_float(run.group["lr"]),
            weight_decay=as_float(run.group["weight_decay"]),
            beta1=as_float(beta1),
            beta2=as_float(beta2),
        )

    def shard(self, one: FlatArrays, segments: list[LionSegment]) -> LionShard:
        """As Lion's kernel takes it."""
        return LionShard(
            param=one.param,
            grads=one.grads,
            param_out=one.param_out,
            exp_avg=one.states["exp_avg"],
            segments=segments,
        )

    def call(self, shards: list[LionShard], grad_scale: float) -> None:
        """Lion."""
        lion_step(shards, grad_scale=grad_scale)

    def call_on_device(self, shards: list[LionShard], grad_scale: float, stream: int) -> None:
        """Lion."""
        cuda.lion_step(shards, grad_scale=grad_scale, stream=stream)

    def foreach(self, pieces: Pieces) -> None:
        """Update with torch's operations."""
        lr, (beta1, beta2) = as_float(pieces.group["lr"]), map(as_float, pieces.group["betas"])
        exp_avgs = pieces.states["exp_avg"]
        torch._foreach_mul_(pieces.params, 1 - lr * as_float(pieces.group["weight_decay"]))
        directions = torch._foreach_lerp(exp_avgs, pieces.grads, 1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_add_(pieces.params, directions, alpha=-lr)
        torch._foreach_lerp_(exp_avgs, pieces.grads, 1 - beta2)
