"""Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..optim.formulas.adagrad import AdagradFormula
from ..optim.formulas.formula import Formula
from .optimizer import FusedOptimizer, Params

_FORMULA = AdagradFormula()


class DeepSpeedCPUAdagrad(FusedOptimizer):
    """Adagrad with the arguments of DeepSpeed's DeepSpeedCPUAdagrad, for host memory.

    Its state_dict is that of `torch.optim.Adagrad`, and so are two more keys of its groups: `lr_decay` and
    `initial_accumulator_value`. A sparse gradient is made dense for the step, which moves no
    element that it does not name.
    Source: the arguments are those of DeepSpeed 0.19.8 ops/adagrad/cpu_adagrad.py, `DeepSpeedCPUAdagrad`
    """

    state_names = AdagradFormula.state_names
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

    def formula_of(self, group: Mapping[str, Any]) -> Formula:
        """Return the one."""
        return _FORMULA

    def make_states(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the sum with which it begins."""
        states = super().make_states(param, group)
        states["sum"].fill_(group["initial_accumulator_value"])
        return states

    def _dense(self, param: Tensor, group: Mapping[str, Any], where: str) -> Tensor:
        grad = param.grad
        if grad is None or grad.layout is not torch.sparse_coo:
            return super()._dense(param, group, where)
        if group["weight_decay"]:
            raise RuntimeError(
                f"DeepSpeedCPUAdagrad: group {where} has a sparse gradient and weight_decay={group['weight_decay']}, which would "
                "move elements that the gradient does not name; set weight_decay to 0 for it"
            )
        return grad.to_dense()
