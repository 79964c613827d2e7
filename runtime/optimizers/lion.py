"""Lion: the sign of an average of gradients."""

from __future__ import annotations

import torch

from ...kernels import LION
from .formula import Formula, Pieces
from .fused_optimizer import FusedOptimizer, Params
from .on_device import as_float


class LionFormula(Formula):
    """Every element moves by lr, against the sign of beta1 * exp_avg + (1 - beta1) * grad;
    weight decay is decoupled.

    Source: Chen et al. 2023, "Symbolic discovery of optimization algorithms", arXiv 2302.06675, program 1
    """

    name = "Lion"
    kernel = LION

    def foreach(self, pieces: Pieces) -> None:
        """Update with torch's operations."""
        lr, (beta1, beta2) = as_float(pieces.group["lr"]), map(as_float, pieces.group["betas"])
        exp_avgs = pieces.states["exp_avg"]
        torch._foreach_mul_(pieces.params, 1 - lr * as_float(pieces.group["weight_decay"]))
        directions = torch._foreach_lerp(exp_avgs, pieces.grads, 1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_add_(pieces.params, directions, alpha=-lr)
        torch._foreach_lerp_(exp_avgs, pieces.grads, 1 - beta2)


FORMULAS = (LionFormula(),)


class FusedLion(FusedOptimizer):
    """Lion with the arguments of DeepSpeed's FusedLion, on a GPU or in host memory.

    Source: the arguments are those of DeepSpeed 0.19.8 ops/lion/fused_lion.py, `FusedLion`
    """

    formula = FORMULAS[0]

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


class DeepSpeedCPULion(FusedOptimizer):
    """Lion with the arguments of DeepSpeed's DeepSpeedCPULion, for host memory.

    Source: the arguments are those of DeepSpeed 0.19.8 ops/lion/cpu_lion.py, `DeepSpeedCPULion`
    """

    formula = FORMULAS[0]
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
