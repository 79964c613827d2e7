"""The formulas in float64 with bounds, as `Bounded`: what each optimizer must do to one parameter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.runtime.optimizers.bounded import Bounded

number = Bounded.constant


@dataclass
class Reference:
    """One parameter, its states by name, and the hyper-parameters of its group."""

    param: Bounded
    group: dict[str, Any]
    states: dict[str, Bounded] = field(default_factory=dict)
    steps: int = 0

    def state(self, name: str) -> Bounded:
        return self.states.get(name, Bounded.exact(torch.zeros(self.param.value.shape)))

    def step(self, grad: Tensor) -> None:
        self.steps += 1
        self.update(Bounded.exact(grad))

    def update(self, g: Bounded) -> None:
        raise NotImplementedError

    def average(self, name: str, beta: float, g: Bounded) -> Bounded:
        self.states[name] = number(beta) * self.state(name) + number(1 - beta) * g
        return self.states[name]


class AdamReference(Reference):
    """Kingma and Ba, Adam; Loshchilov and Hutter, decoupled weight decay."""

    def update(self, g: Bounded) -> None:
        lr, (beta1, beta2), decay = self.group["lr"], self.group["betas"], self.group["weight_decay"]
        if self.group["decoupled"]:
            self.param = self.param * number(1 - lr * decay)
        else:
            g = g + number(decay) * self.param
        m = self.average("exp_avg", beta1, g)
        v = self.average("exp_avg_sq", beta2, g * g)
        corrects = self.group.get("bias_correction", True)
        correction1 = 1 - beta1**self.steps if corrects else 1.0
        correction2 = 1 - beta2**self.steps if corrects else 1.0
        root = v.sqrt() / number(correction2**0.5) + number(self.group["eps"])
        self.param = self.param - number(lr / correction1) * m / root


class LionReference(Reference):
    """Chen et al., program 1. Where rounding may turn the sign, every sign is allowed."""

    def update(self, g: Bounded) -> None:
        lr, (beta1, beta2), decay = self.group["lr"], self.group["betas"], self.group["weight_decay"]
        direction = number(beta1) * self.state("exp_avg") + number(1 - beta1) * g
        unclear = direction.value.abs() <= direction.error
        sign = Bounded(direction.value.sign(), unclear.double() * 2)
        self.param = self.param * number(1 - lr * decay) - number(lr) * sign
        self.average("exp_avg", beta2, g)


class AdagradReference(Reference):
    """Duchi et al., with a diagonal matrix."""

    def update(self, g: Bounded) -> None:
        g = g + number(self.group["weight_decay"]) * self.param
        self.states["sum"] = self.state("sum") + g * g
        root = self.states["sum"].sqrt() + number(self.group["eps"])
        self.param = self.param - number(self.group["lr"]) * g / root


class LambReference(Reference):
    """You et al., algorithm 2, with the quotient of norms clamped."""

    def update(self, g: Bounded) -> None:
        beta1, beta2 = self.group["betas"]
        m = self.average("exp_avg", beta1, g)
        v = self.average("exp_avg_sq", beta2, g * g)
        eps = number(self.group["eps"])
        root = (v + eps).sqrt() if self.group["eps_inside_sqrt"] else v.sqrt() + eps
        u = m / root + number(self.group["weight_decay"]) * self.param
        size = self.group["lr"]
        if self.group["bias_correction"]:
            size *= (1 - beta2**self.steps) ** 0.5 / (1 - beta1**self.steps)
        self.param = self.param - number(size) * self._quotient(u) * u

    def _quotient(self, u: Bounded) -> Bounded:
        of_param, of_update = _norm(self.param), _norm(u)
        if not of_param.value or not of_update.value:
            return number(1.0)
        quotient = of_param / of_update
        low, high = self.group["min_coeff"], self.group["max_coeff"]
        return Bounded(quotient.value.clamp(low, high), quotient.error)


def _norm(x: Bounded) -> Bounded:
    """n products and n additions, in any order: n roundings more."""
    n = x.value.numel()
    value = x.value.norm()
    return Bounded(value, x.error.norm() + 2 * (n + 2) * 2.0**-24 * (value + x.error.norm()))
