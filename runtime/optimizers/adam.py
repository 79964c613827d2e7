"""AdamW, and Adam with L2 weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from ...kernels import AdamSegment, AdamShard, adamw_step, cuda
from .formula import FlatArrays, Formula, Group, Pieces, Run, corrected_step
from .fused_optimizer import FusedOptimizer, Params
from .on_device import as_float

_Hyper = tuple[float, float, float, float, float]


class AdamFormula(Formula):
    """Adam as `torch.optim.AdamW` and `Adam` do it; without bias correction where a group's `bias_correction` is false."""

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, *, adam_w_mode: bool) -> None:
        self.adam_w_mode = adam_w_mode

    def segment(self, run: Run) -> AdamSegment:
        """As Adam's kernel takes it."""
        lr, beta1, beta2, eps, weight_decay = _hyper(run.group)
        return AdamSegment(
            offset=run.offset,
            numel=run.numel,
            lr=lr,
            weight_decay=weight_decay,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            step=corrected_step(run),
        )

    def shard(self, one: FlatArrays, segments: list[AdamSegment]) -> AdamShard:
        """As Adam's kernel takes it."""
        return AdamShard(
            param=one.param,
            grads=one.grads,
            param_out=one.param_out,
            exp_avg=one.states["exp_avg"],
            exp_avg_sq=one.states["exp_avg_sq"],
            segments=segments,
        )

    def call(self, shards: list[AdamShard], grad_scale: float) -> None:
        """AdamW or Adam."""
        adamw_step(shards, grad_scale=grad_scale, adam_w_mode=self.adam_w_mode)

    def call_on_device(self, shards: list[AdamShard], grad_scale: float, stream: int) -> None:
        """AdamW or Adam."""
        cuda.adamw_step(shards, grad_scale=grad_scale, adam_w_mode=self.adam_w_mode, stream=stream)

    def foreach(self, pieces: Pieces) -> None:
        """Call torch's fused kernel."""
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        lr, beta1, beta2, eps, weight_decay = _hyper(pieces.group)
        device = pieces.params[0].device
        count = torch.tensor(float(corrected_step(pieces)), device=device)
        kernel(
            pieces.params,
            pieces.grads,
            pieces.states["exp_avg"],
            pieces.states["exp_avg_sq"],
            [],
            [count] * len(pieces.params),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )


def _hyper(group: Group) -> _Hyper:
    beta1, beta2 = group["betas"]
    return (
        as_float(group["lr"]),
        as_float(beta1),
        as_float(beta2),
        as_float(group["eps"]),
        as_float(group["weight_decay"]),
    )


class _Adam(FusedOptimizer):
    """What both have in common. The constructor's mode is every group's `decoupled_weight_decay`, which torch reads there."""

    state_names = AdamFormula.state_names

    @property
    def adam_w_mode(self) -> bool:
        """Whether weight decay is decoupled."""
        return bool(self.defaults["decoupled_weight_decay"])

    def formula_of(self, group: Mapping[str, Any]) -> Formula:
        """Return AdamW or Adam."""
        return _formula(self.adam_w_mode)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyper-parameters of their own, in the constructor's mode."""
        mode = param_group.get("decoupled_weight_decay", self.adam_w_mode)
        if bool(mode) is not self.adam_w_mode:
            raise ValueError(
                f"{type(self).__name__}: group {len(self.param_groups)} has decoupled_weight_decay={mode!r}, and the constructor "
                f"said {self.adam_w_mode}; make an optimizer for each"
            )
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = self.adam_w_mode


class FusedAdam(_Adam):
    """AdamW, or Adam with `adam_w_mode=False`, with the arguments of DeepSpeed's FusedAdam, on a GPU or in host memory.

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
    """AdamW, or Adam with `adamw_mode=False`, with the arguments of DeepSpeed's DeepSpeedCPUAdam, for host memory.

    `fp32_optimizer_states=False` keeps the moments of a 16-bit parameter in its dtype. Its state_dict is torch's, as that of
    `FusedAdam`.
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


@cache
def _formula(adam_w_mode: bool) -> AdamFormula:
    return AdamFormula(adam_w_mode=adam_w_mode)


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
