"""Classes that DeepSpeed's checkpoints name: what they held, for programs that unpickle such
files by themselves.

dslaunch's own reader takes no classes from files, see runtime/checkpoint/deepspeed/pickle_file.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class fragment_address:
    """Place of a parameter in a flat buffer. Units: elements"""

    numel: int
    start: int


@dataclass
class SubparamShape:
    """A parameter that is several, one after the other."""

    patterns: list[str] = field(default_factory=list)
    shape: tuple[Any, ...] = ()
    partition_dim: int = 0


class LossScalerState:
    """State of a loss scaler of DeepSpeed's, as attributes: `cur_scale`, `dynamic` and others."""

    cur_scale: float
    dynamic: bool

    @property
    def loss_scale(self) -> float:
        return self.cur_scale
