"""Adagrad: every element's step is divided by the root of the sum of its squared gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels import ADAGRAD
from .formula import Formula, Pieces
from .fused_optimizer import FusedOptimizer, Params
from .on_device import as_float


class AdagradFormula(Formula):
    """Update sum += g * g; p -= lr * g / (sqrt(sum) + eps), with L2 weight decay in g.

    Source: Duchi et al. 2011, "Adaptive subgradient methods"; as torch.optim.Adagrad without maximize, with
            lr / (1 + (step - 1) * lr_decay) where a group has lr_decay
    """

    name = "Adagrad"
    kernel = ADAGRAD
    initial: ClassVar = {"sum": "initial_accumulator_value"}

    def foreach(self, pieces: Pieces) -> None:
        """Update with torch's operations."""
        group, grads, sums = pieces.group, pieces.grads, pieces.states["sum"]
        weight_decay = as_float(group["weight_decay"])
        if weight_decay:
            grads = list(torch._foreach_add(grads, pieces.params, alpha=weight_decay))
        torch._foreach_addcmul_(sums, grads, grads, 1.0)
        roots = torch._foreach_sqrt(sums)
        torch._foreach_add_(roots, as_float(group["eps"]))
        lr = as_float(group["lr"]) / (1 + (pieces.step - 1) * as_float(group.get("lr_decay", 0.0)))
        torch._foreach_addcdiv_(pieces.params, grads, roots, -lr)


FORMULAS = (AdagradFormula(),)


class DeepSpeedCPUAdagrad(FusedOptimizer):
    """Adagrad with the arguments of DeepSpeed's DeepSpeedCPUAdagrad, for host memory.

    Its state_dict is that of `torch.optim.Adagrad`, and its groups have that class's keys `lr_decay` and
    `initial_accumulator_value`, too. A sparse gradient is made dense for the step; only elements that it
    stores are moved.
    Source: the arguments are those of DeepSpeed 0.19.8 ops/adagrad/cpu_adagrad.py, `DeepSpeedCPUAdagrad`
    """

    formula = FORMULAS[0]
    host_only = True

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Refuse `amsgrad` by name."""
        super().__init__(
            model_params,
            {
                "lr": lr,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "lr_decay": 0.0,
                "initial_accumulator_value": 0.0,
            },
            fp32_optimizer_states=fp32_optimizer_states,
        )

    def _dense(self, param: Tensor, group: Mapping[str, Any], where: str) -> Tensor:
        grad = param.grad
        if grad is None or grad.layout is not torch.sparse_coo:
            return super()._dense(param, group, where)
        if group["weight_decay"]:
            raise RuntimeError(
                f"DeepSpeedCPUAdagrad: group {where} has a sparse gradient and "
                f"weight_decay={group['weight_decay']}, which would move elements that the gradient does not "
                "name; set weight_decay to 0 for it"
            )
        return grad.to_dense()
