"""LAMB: Adam in which each parameter's step has the length lr times the norm of the parameter."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from ...kernels import LAMB, LambShard, cuda, lamb_step
from .flat_arrays import Group
from .formula import Formula, Pieces, corrected_step
from .fused_optimizer import FusedOptimizer, Params
from .on_device import as_float


class LambFormula(Formula):
    """Update u = exp_avg / (sqrt(exp_avg_sq) + eps) + weight_decay * p; step lr * clamp(|p| / |u|,
    min_coeff, max_coeff) * u.

    The quotient of the norms is 1 if either norm is zero. `bias_correction` is Adam's, as a factor of lr.
    Source: You et al. 2020, "Large batch optimization for deep learning", arXiv 1904.00962, algorithm 2;
            clamp, defaults and the place of the bias correction as DeepSpeed 0.19.8
            ops/lamb/fused_lamb.py, `FusedLamb`
    """

    name = "Lamb"
    kernel = LAMB
    is_elementwise = False

    def __init__(self, *, eps_inside_sqrt: bool) -> None:
        self.mode = int(eps_inside_sqrt)

    def for_group(self, group: Group) -> Formula:
        """Return the formula in the group's mode, which says where eps is added."""
        return FORMULAS[bool(group["eps_inside_sqrt"])]

    def call(self, shards: list[LambShard], grad_scale: float) -> None:
        """LAMB."""
        lamb_step(shards, grad_scale=grad_scale, eps_inside_sqrt=self.mode == 1)

    def call_on_device(self, shards: list[LambShard], grad_scale: float, stream: int) -> None:
        """LAMB."""
        on_device: Tensor = shards[0].param  # type: ignore[assignment]  # any tensor on the device

        def allocate(numel: int) -> Tensor:
            return on_device.new_empty(numel, dtype=torch.float64)

        cuda.lamb_step(
            shards,
            grad_scale=grad_scale,
            eps_inside_sqrt=self.mode == 1,
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
        if self.mode == 1:
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


FORMULAS = tuple(LambFormula(eps_inside_sqrt=is_inside) for is_inside in (False, True))


class FusedLamb(FusedOptimizer):
    """LAMB with the arguments of DeepSpeed's FusedLamb, on a GPU or in host memory.

    `max_grad_norm` is refused: it needs norms as an argument of step(), which is not supported here.
    Source: the arguments are those of DeepSpeed 0.19.8 ops/lamb/fused_lamb.py, `FusedLamb`
    """

    is_elementwise = False
    is_per_parameter = True
    formula = FORMULAS[0]

    def __init__(  # noqa: PLR0913
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        """Refuse `amsgrad` and `max_grad_norm` by name."""
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "eps_inside_sqrt": eps_inside_sqrt,
                "weight_decay": weight_decay,
                "max_grad_norm": max_grad_norm,
                "max_coeff": max_coeff,
                "min_coeff": min_coeff,
                "amsgrad": amsgrad,
            },
        )

    def _check(self, group: Mapping[str, Any], where: str) -> None:
        super()._check(group, where)
        if group["max_grad_norm"]:
            raise ValueError(
                f"FusedLamb: {where} has max_grad_norm={group['max_grad_norm']}, which FusedLamb does not "
                "support; set gradient_clipping in the ds_config, or call torch.nn.utils.clip_grad_norm_ "
                "before step()"
            )
        low, high = group["min_coeff"], group["max_coeff"]
        if not 0.0 <= low <= high:
            raise ValueError(
                f"FusedLamb: {where} has min_coeff={low} and max_coeff={high}; min_coeff must be at least 0 "
                "and at most max_coeff"
            )
