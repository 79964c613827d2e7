"""Lion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..optim.formulas.formula import Formula
from ..optim.formulas.lion import LionFormula
from .optimizer import FusedOptimizer, Params

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
