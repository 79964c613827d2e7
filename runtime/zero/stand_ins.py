"""Parameters that no unit holds, and what answers for them: those of an engine of torch alone."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class ParamStandIn(Protocol):
    """The whole values of one trained parameter, float32. Those of gradients are collectives."""

    name: str  # in the model; the same on every rank

    def value(self) -> Tensor:
        """Return a copy of the value that the optimizer updates."""

    def set_value(self, value: Tensor) -> None:
        """Set it, and the parameter with it."""

    def spread(self, rank: int) -> None:
        """Let all ranks have the parameter as it is on this rank of the job: a collective."""

    def gradient(self) -> Tensor:
        """Return the average of the gradients so far."""

    def set_gradient(self, value: Tensor) -> None:
        """Set the average."""

    def state(self, key: str) -> Tensor | None:
        """Return a copy of an optimizer's state; None before the first step."""

    def set_state(self, key: str, value: Tensor) -> None:
        """Set an optimizer's state."""


_STAND_INS: Any = WeakTensorKeyDictionary()  # parameter -> ParamStandIn; it keeps no parameter alive


def note_stand_in(param: Tensor, stand_in: ParamStandIn) -> None:
    """Let this object answer for the parameter."""
    _STAND_INS[param] = stand_in


def stand_in_of(param: Tensor) -> ParamStandIn | None:
    """Return what answers for a parameter; None if a unit does, or nothing."""
    found: ParamStandIn | None = _STAND_INS.get(param)
    return found
