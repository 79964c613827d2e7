"""LAMB."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..optim.formulas.formula import Formula
from ..optim.formulas.lamb import LambFormula
from .optimizer import FusedOptimizer, Params

_FORMULAS = {is_inside: LambFormula(eps_inside_sqrt=is_inside) for is_inside in (False, True)}


class FusedLamb(FusedOptimizer):
    """LAMB with the arguments of DeepSpeed's FusedLamb, on a GPU or in host memory.

    `max_grad_norm` needs norms that are given to step(), which this one does not take: it is refused.
    Source: the arguments are those of DeepSpeed 0.19.8 ops/lamb/fused_lamb.py, `FusedLamb`
    """

    is_elementwise = False
    state_names = LambFormula.state_names

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

    def formula_of(self, group: Mapping[str, Any]) -> Formula:
        """Return the one with eps at its place."""
        return _FORMULAS[bool(group["eps_inside_sqrt"])]

    def _check(self, group: Mapping[str, Any], where: str) -> None:
        super()._check(group, where)
        if group["max_grad_norm"]:
            raise ValueError(
                f"FusedLamb: {where} has max_grad_norm={group['max_grad_norm']}, which it does not do; set gradient_clipping in the "
                "ds_config, or call torch.nn.utils.clip_grad_norm_ before step()"
            )
        low, high = group["min_coeff"], group["max_coeff"]
        if not 0.0 <= low <= high:
            raise ValueError(
                f"FusedLamb: {where} has min_coeff={low} and max_coeff={high}; min_coeff must be at least 0 and at most max_coeff"
            )
