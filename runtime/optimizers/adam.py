"""AdamW, and Adam with L2 weight decay."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels import ADAM
from .flat_arrays import Group
from .formula import Formula, Pieces, corrected_step
from .fused_optimizer import FusedOptimizer, Params
from .on_device import as_float


class AdamFormula(Formula):
    """Adam as `torch.optim.AdamW` and `Adam` do it; without bias correction where a group's
    `bias_correction` is false.
    """

    kernel = ADAM

    def __init__(self, *, adam_w_mode: bool) -> None:
        self.mode = int(adam_w_mode)
        self.name = "AdamW" if adam_w_mode else "Adam"

    def for_group(self, group: Group) -> Formula:
        """Return the formula with the group's kind of weight decay, by torch's key
        `decoupled_weight_decay`.
        """
        adam_w, adam = FORMULAS
        return adam_w if group.get("decoupled_weight_decay", self.mode) else adam

    def foreach(self, pieces: Pieces) -> None:
        """Call torch's fused kernel."""
        kernel = torch._fused_adamw_ if self.mode else torch._fused_adam_
        group = pieces.group
        beta1, beta2 = map(as_float, group["betas"])
        device = pieces.params[0].device
        steps = float(corrected_step(pieces))
        # full() and no copy of a number: the host would wait for that
        count = torch.full((), steps, dtype=torch.float32, device=device)
        kernel(
            pieces.params,
            pieces.grads,
            pieces.states["exp_avg"],
            pieces.states["exp_avg_sq"],
            [],
            [count] * len(pieces.params),
            lr=as_float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            weight_decay=as_float(group["weight_decay"]),
            eps=as_float(group["eps"]),
            amsgrad=False,
            maximize=False,
        )


FORMULAS = (AdamFormula(adam_w_mode=True), AdamFormula(adam_w_mode=False))


class _Adam(FusedOptimizer):
    """Common part of Adam and AdamW. The constructor's mode is every group's `decoupled_weight_decay`, which
    torch reads there.
    """

    formula = FORMULAS[0]

    @property
    def adam_w_mode(self) -> bool:
        """True if weight decay is decoupled."""
        return bool(self.defaults["decoupled_weight_decay"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyper-parameters of their own, in the constructor's mode."""
        mode = param_group.get("decoupled_weight_decay", self.adam_w_mode)
        if bool(mode) is not self.adam_w_mode:
            raise ValueError(
                f"{type(self).__name__}: group {len(self.param_groups)} has decoupled_weight_decay={mode!r}, "
                f"and the constructor said {self.adam_w_mode}; make an optimizer for each"
            )
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = self.adam_w_mode


class FusedAdam(_Adam):
    """AdamW, or Adam with `adam_w_mode=False`, with the arguments of DeepSpeed's FusedAdam,
    on a GPU or in host memory.

    Its state_dict is torch's: one of `torch.optim.AdamW` or `Adam` can be loaded, and the other way round.
    Source: the arguments are those of DeepSpeed 0.19.8 ops/adam/fused_adam.py, `FusedAdam`
    """

    def __init__(  # noqa: PLR0913
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        """Refuse `amsgrad` by name."""
        super().__init__(
            params,
            _defaults(lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode),
            set_grad_none=set_grad_none,
        )


class DeepSpeedCPUAdam(_Adam):
    """AdamW, or Adam with `adamw_mode=False`, with the arguments of DeepSpeed's
    DeepSpeedCPUAdam, for host memory.

    `fp32_optimizer_states=False` keeps the moments of a 16-bit parameter in its dtype. Its state_dict is
    torch's, as that of `FusedAdam`.
    Source: the arguments are those of DeepSpeed 0.19.8 ops/adam/cpu_adam.py, `DeepSpeedCPUAdam`
    """

    host_only = True

    def __init__(  # noqa: PLR0913
        self,
        model_params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Refuse `amsgrad` by name."""
        super().__init__(
            model_params,
            _defaults(lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode),
            fp32_optimizer_states=fp32_optimizer_states,
        )


def _defaults(
    lr: float,
    bias_correction: bool,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    adam_w_mode: bool,
) -> dict[str, Any]:
    return {
        "lr": lr,
        "bias_correction": bias_correction,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "amsgrad": amsgrad,
        "decoupled_weight_decay": bool(adam_w_mode),
    }
