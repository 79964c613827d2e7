"""LAMB: Adam whose step is, for each parameter, as long as the parameter itself times lr."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """Update u = exp_avg / (sqrt(exp_avg_sq) + eps) + weight_decay * p; step lr * clamp(|p| / |u|, min_coeff, max_coeff) * u.

    The quotient of the norms is 1 where either is zero. `bias_correction` is Adam's, as a factor of lr.
    Source: You et al. 2020, "Large batch optimization for deep learning", arXiv 1904.00962, algorithm 2; clamp, defaults and
            the place of the bias correction as DeepSpeed 0.19.8 ops/lamb/fused_lamb.py, `FusedLamb`
    """

    def __init__(  # noqa: PLR0913
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        """Take DeepSpeed's defaults."""
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "eps_inside_sqrt": eps_inside_sqrt,
                "weight_decay": weight_decay,
                "max_coeff": max_coeff,
                "min_coeff": min_coeff,
            },
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        state["step"] += 1
        (beta1, beta2), eps = group["betas"], group["eps"]
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.lerp_(grad.square(), 1 - beta2)
        root = (exp_avg_sq + eps).sqrt_() if group["eps_inside_sqrt"] else exp_avg_sq.sqrt().add_(eps)
        update = (exp_avg / root).add_(param, alpha=group["weight_decay"])
        step_size = group["lr"]
        if group["bias_correction"]:
            step_size *= sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        param_norm, update_norm = float(param.norm()), float(update.norm())
        quotient = 1.0
        if param_norm > 0 and update_norm > 0:
            quotient = min(max(param_norm / update_norm, group["min_coeff"]), group["max_coeff"])
        param.add_(update, alpha=-step_size * quotient)
