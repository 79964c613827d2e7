"""optimizer: which one, and its parameters."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from .section import Section
from .value import Beta, Betas, Bool, Size

OptimizerType = Literal["Adam", "AdamW", "SGD"]


class AdamParams(Section):
    """Adam with decoupled weight decay (AdamW), or with L2 weight decay where `adam_w_mode` is false.

    Source: DeepSpeed 0.19.6 ops/adam/fused_adam.py, `FusedAdam`; the same defaults.
    """

    lr: Size = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: Size = 1e-8
    weight_decay: Size = 0.0
    adam_w_mode: Bool = True


class SGDParams(Section):
    """Stochastic gradient descent as torch.optim.SGD does it; the same defaults."""

    lr: Size = 1e-3
    momentum: Beta = 0.0
    dampening: Size = 0.0
    weight_decay: Size = 0.0
    nesterov: Bool = False

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> SGDParams:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError(
                f"optimizer.params.nesterov true needs a momentum above 0 and no dampening; "
                f"momentum is {self.momentum}, dampening is {self.dampening}"
            )
        return self


class OptimizerConfig(Section):
    """The optimizer to build; the class of `params` follows from `type`."""

    type: OptimizerType
    params: AdamParams | SGDParams


PARAMS_OF: dict[str, type[AdamParams] | type[SGDParams]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "SGD": SGDParams,
}
