"""LAMB: Adam whose step is, for each parameter, as long as the parameter itself times lr."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from ....kernels import LambSegment, LambShard, cuda, lamb_step
from ..numbers import as_float
from .formula import FlatArrays, Formula, Pieces, Run, corrected_step


class LambFormula(Formula):
    """Update u = exp_avg / (sqrt(exp_avg_sq) + eps) + weight_decay * p; step lr * clamp(|p| / |u|, min_coeff, max_coeff) * u.

    The quotient of the norms is 1 where either is zero. `bias_correction` is Adam's, as a factor of lr.
    Source: You et al. 2020, "Large batch optimization for deep learning", arXiv 1904.00962, algorithm 2; clamp, defaults and
            the place of the bias correction as DeepSpeed 0.19.8 ops/lamb/fused_lamb.py, `FusedLamb`
    """

    state_names = ("exp_avg", "exp_avg_sq")
    is_elementwise = False

    def __init__(self, *, eps_inside_sqrt: bool) -> None:
        self.eps_inside_sqrt = eps_inside_sqrt

    def segment(self, run: Run) -> LambSegment:
        """As LAMB's kernel takes it."""
        beta1, beta2 = run.group["betas"]
        return LambSegment(
            offset=run.offset,
            numel=run.numel,
            lr=as_float(run.group["lr"]),
            weight_decay=as_float(run.group["weight_decay"]),
            beta1=as_float(beta1),
            beta2=as_float(beta2),
            eps=as_float(run.group["eps"]),
            step=corrected_step(run),
            min_coeff=as_float(run.group["min_coeff"]),
            max_coeff=as_float(run.group["max_coeff"]),
        )

    def shard(self, one: FlatArrays, segments: list[LambSegment]) -> LambShard:
        """As LAMB's kernel takes it, with room for the direction."""
        return LambShard(
            param=one.param,
            grads=one.grads,
            param_out=one.param_out,
            exp_avg=one.states["exp_avg"],
            exp_avg_sq=one.states["exp_avg_sq"],
            update=torch.empty_like(one.param),
            segments=segments,
        )

    def call(self, shards: list[LambShard], grad_scale: float) -> None:
        """LAMB."""
        lamb_step(shards, grad_scale=grad_scale, eps_inside_sqrt=self.eps_inside_sqrt)

    def call_on_device(self, shards: list[LambShard], grad_scale: float, stream: int) -> None:
        """LAMB."""
        on_device: Tensor = shards[0].param  # type: ignore[assignment]  # whatever has memory

        def allocate(numel: int) -> Tensor:
            return on_device.new_empty(numel, dtype=torch.float64)

        cuda.lamb_step(
            shards,
            grad_scale=grad_scale,
            eps_inside_sqrt=self.eps_inside_sqrt,
            allocate=allocate,
            stream=stream,
        )

    def foreach(self, pieces: Pieces) -> None:
        """Update with torch's operations."""
        group, params, grads = pieces.group, pieces.params, pieces.grads
        exp_avgs, exp_avg_sqs = pieces.states["exp_avg"], pieces.states["exp_avg_sq"]
        (beta1, beta2), eps = map(as_float, group["betas"]), as_float(group["eps"])
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
        if self.eps_inside_sqrt:
            roots = torch._foreach_sqrt(torch._foreach_add(exp_avg_sqs, eps))
        else:
            roots = torch._foreach_add(torch._foreach_sqrt(exp_avg_sqs), eps)
        updates = torch._foreach_div(exp_avgs, roots)
        torch._foreach_add_(updates, params, alpha=as_float(group["weight_decay"]))
        step_size = as_float(group["lr"])
        step = corrected_step(pieces)
        step_size *= sqrt(1 - beta2**step) / (1 - beta1**step)
        low, high = as_float(group["min_coeff"]), as_float(group["max_coeff"])
        norms = zip(torch._foreach_norm(params), torch._foreach_norm(updates), strict=True)
        for param, update, (of_param, of_update) in zip(params, updates, norms, strict=True):
            is_one = (of_param == 0) | (of_update == 0)
            quotient = torch.where(is_one, torch.ones_like(of_param), (of_param / of_update).clamp(low, high))
            param.addcmul_(update, quotient * -step_size)
