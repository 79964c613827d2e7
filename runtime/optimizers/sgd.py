"""SGD, with momentum or without."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...kernels import SGD
from .flat_arrays import Group
from .formula import Formula, Pieces
from .on_device import as_float


class SgdFormula(Formula):
    """SGD as torch.optim.SGD without maximize: L2 weight decay, and momentum with dampening or Nesterov's.

    The first step puts the gradient itself into the momentum buffer, without dampening.
    """

    name = "SGD"
    kernel = SGD

    def names_for(self, groups: Iterable[Group]) -> tuple[str, ...]:
        """Return no names if no group has momentum."""
        return self.state_names if any(group["momentum"] for group in groups) else ()

    def foreach(self, pieces: Pieces) -> None:
        """Update with torch's operations."""
        group, updates = pieces.group, pieces.grads
        weight_decay, momentum = as_float(group["weight_decay"]), as_float(group["momentum"])
        if weight_decay:
            updates = list(torch._foreach_add(updates, pieces.params, alpha=weight_decay))
        if momentum:
            buffers = pieces.states["momentum_buffer"]
            is_first = pieces.step == 1
            torch._foreach_mul_(buffers, 0.0 if is_first else momentum)
            torch._foreach_add_(buffers, updates, alpha=1.0 if is_first else 1 - as_float(group["dampening"]))
            updates = (
                list(torch._foreach_add(updates, buffers, alpha=momentum)) if group["nesterov"] else buffers
            )
        torch._foreach_add_(pieces.params, updates, alpha=-as_float(group["lr"]))


FORMULAS = (SgdFormula(),)
