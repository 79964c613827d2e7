"""Lion: the sign of an average of gradients."""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Every element moves by lr, in the direction of beta1 * exp_avg + (1 - beta1) * grad; weight decay is decoupled.

    Source: Chen et al. 2023, "Symbolic discovery of optimization algorithms", arXiv 2302.06675, program 1
    """

    is_elementwise = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        """Take the same defaults as DeepSpeed's FusedLion."""
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                exp_avg = state["exp_avg"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                direction = exp_avg.lerp(param.grad, 1 - beta1).sign_()
                param.add_(direction, alpha=-group["lr"])
                exp_avg.lerp_(param.grad, 1 - beta2)
