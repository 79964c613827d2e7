"""Everything that a checkpoint is made of, while it is alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..comm.collectives import Collectives
from ..config import Config
from ..optim.flat import FlatOptimizer
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
    config: Config
    comm: Collectives
