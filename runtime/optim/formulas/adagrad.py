"""Adagrad: every element's step is divided by the root of the sum of its squared gradients."""

from __future__ import annotations

import torch

from ..numbers import as_float
from .formula import Formula, Group, Pieces


class AdagradFormula(Formula):
    """Update sum += g * g; p -= lr * g / (sqrt(sum) + eps), with L2 weight decay in g.

    Source: Duchi et al. 2011, "Adaptive subgradient methods"; as torch.optim.Adagrad without maximize, with lr / (1 + (step - 1) * lr_decay)
            where a group has lr_decay
    """

    state_names = ("sum",)

    def foreach(self, pieces: Pieces) -> None:
        """Update with torch's operations."""
        group, grads, sums = pieces.group, pieces.grads, pieces.states["sum"]
        weight_decay = as_float(group["weight_decay"])
        if weight_decay:
            grads = list(torch._foreach_add(grads, pieces.params, alpha=weight_decay))
        torch._foreach_addcmul_(sums, grads, grads, 1.0)
        roots = torch._foreach_sqrt(sums)
        torch._foreach_add_(roots, as_float(group["eps"]))
        torch._foreach_addcdiv_(pieces.params, grads, roots, -decayed_lr(group, pieces.step))


def decayed_lr(group: Group, step: int) -> float:
    """Return the lr of this step."""
    return as_float(group["lr"]) / (1 + (step - 1) * as_float(group.get("lr_decay", 0.0)))
