"""Lion: the sign of an average of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...kernels import LionSegment, LionShard, cuda, lion_step
from .formula import FlatArrays, Formula, Pieces, Run
from .fused_optimizer import FusedOptimizer, Params
from .on_device import as_float


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


_FORMULA = LionFormula()


class _Lion(FusedOptimizer):
    state_names = LionFormula.state_names
    counts_steps = False

    def formula_of(self, group: Mapping[str, Any]) -> Formula:
        """Return the one."""
        return _FORMULA


class FusedLion(_Lion):
    """Lion with the arguments of DeepSpeed's FusedLion, on a GPU or in host memory.

    Source: the arguments are those of DeepSpeed 0.19.8 ops/lion/fused_lion.py, `FusedLion`
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, set_grad_none=set_grad_none
        )


class DeepSpeedCPULion(_Lion):
    """Lion with the arguments of DeepSpeed's DeepSpeedCPULion, for host memory.

    Source: the arguments are those of DeepSpeed 0.19.8 ops/lion/cpu_lion.py, `DeepSpeedCPULion`
    """

    host_only = True

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay},
            fp32_optimizer_states=fp32_optimizer_states,
        )
