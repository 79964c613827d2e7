"""How far two runs may differ by rounding, from what they compute in and how work is divided over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_FLOAT32 = torch.finfo(torch.float32).eps
# Multiples of the machine epsilon. Where the ranks compute what one process computes, only sums over ranks
# and micro batches are rounded in another order; where layers or sequences are divided, every layer's sums.
_ALIKE, _DIVIDED = 16.0, 512.0
_DIVIDED_16_BIT = 24.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Each is a part of the right value: of the loss, of the largest element of what a gradient is a sum of,
    of the norm.
    """

    loss: float
    gradient: float
    whole: float  # bound of the norm of a gradient's difference, as a part of its norm
    norm: float
    floor: float  # a gradient's smallest bound, as a part of the norm of all gradients
    parameter: float  # bound of an element of a parameter
    update: float  # bound of it, as a part of the largest change of a parameter's elements in the step
    state: float  # bound, as a part of the largest element of an optimizer's state
    reason: str


def bounds_of(facts: Mapping[str, Any]) -> Bounds:
    """Return the bounds of a run with these facts; see `facts_of`."""
    axes = facts["axes"]
    # kernels of GPUs may add in another order each time, as those of an embedding's gradient do
    is_divided = (
        axes["tp"] > 1
        or axes["sp"] > 1
        or facts["divides_experts"]
        or facts["device"] != "cpu"
        or facts.get("is_compiled", False)
    )
    name = facts["computes_in"] or facts["dtype"]
    computing = torch.finfo(getattr(torch, name)).eps
    summing = torch.finfo(getattr(torch, facts["dtype"])).eps
    num_sums = facts["micro_batches"] + axes["dp"] * axes["sp"]
    if is_divided:
        gradient = (_DIVIDED if name == "float32" else _DIVIDED_16_BIT) * computing
        loss = gradient / 4
    else:
        gradient = (_ALIKE if facts["dtype"] == "float32" else 1.0) * summing + num_sums * summing / 2
        loss = _ALIKE * _FLOAT32
    if (
        facts["computes_in"] and not is_divided
    ):  # autocast's copies are made anew where parameters are gathered
        gradient, loss = max(gradient, computing), max(loss, computing / 4)
    how = "sums over ranks and micro batches" if not is_divided else "sums in every layer"
    return Bounds(
        loss=loss,
        gradient=gradient,
        whole=gradient / 3,  # rounding hits each element in another way
        norm=gradient / 2,
        floor=min(gradient, _FLOAT32 if not is_divided else computing / 8),
        # values that are kept in 16 bits go to the neighbour below or above
        parameter=8 * _FLOAT32 + _kept(facts.get("masters")),
        update=1e-4,
        state=1e-5 + _kept(facts.get("states")),
        reason=f"{name}, {how}",
    )


def _kept(dtype: str | None) -> float:
    if dtype in (None, "float32"):
        return 0.0
    return 1 / 8 if dtype == "uint8" else torch.finfo(getattr(torch, dtype)).eps
