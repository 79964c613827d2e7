"""Everything that a checkpoint is made of, while it is alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..comm.collectives import Collectives
from ..config import Config
from ..data import Loader
from ..optim.flat import FlatOptimizer
from ..optim.loss_scale import LossScaler
from ..zero.model import ShardedModel
from .progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One engine's parts."""

    module: nn.Module
    model: ShardedModel
    optimizer: FlatOptimizer | None
    scheduler: Any  # has step(), and state_dict() and load_state_dict() if it has a state
    progress: Progress
    loader: Loader | None  # of the training data, where that is ours
    scaler: LossScaler
    config: Config
    comm: Collectives

    def beside_units(self) -> dict[str, Any]:
        """Return what of the module's state_dict lies in no unit: buffers, integer parameters, extra state."""
        in_units = {
            name
            for name, param in self.module.named_parameters(remove_duplicate=False)
            if param.is_floating_point()
        }
        # keep_vars, because detaching a parameter asks for its values, which may be sharded
        state = self.module.state_dict(keep_vars=True)
        return {
            name: value.detach() if isinstance(value, Tensor) else value
            for name, value in state.items()
            if name not in in_units
        }

    def aliases(self) -> dict[str, str]:
        """Return the other names of tied parameters, and the name under which each is in a unit."""
        first: dict[int, str] = {}
        found: dict[str, str] = {}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            known = first.setdefault(id(param), name)
            if known != name:
                found[name] = known
        return found
