"""What an optimizer does to one shard: the arithmetic, without groups of parameters or ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..zero.layout import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """This rank's shard of one sub-buffer, or a run of it, as an optimizer sees it."""

    master: Tensor  # [n] float32, updated in place
    grad: Tensor  # [n] float32, bfloat16 or float16; may be overwritten
    param_out: (
        Tensor | None
    )  # [n] bfloat16 or float16, the rounded copy to write; None: `master` is the parameter
    segments: tuple[Segment, ...]  # which optimizer group owns what; elements outside stay as they are


class Rule(Protocol):
    """One update formula with its states."""

    name: str
    state_names: tuple[str, ...]  # each is [n] float32 and zero at first

    def update(
        self,
        shard: Shard,
        states: Mapping[str, Tensor],
        groups: Sequence[Mapping[str, Any]],
        *,
        step: int,
        grad_scale: float,
    ) -> None:
        """Apply one step; `groups` are the optimizer's param_groups, `step` counts from 1."""


def scaled_grad(shard: Shard, grad_scale: float) -> Tensor:
    """Return the shard's gradient in float32, multiplied by `grad_scale`; may be the gradient itself, overwritten."""
    grad = shard.grad.float()
    return grad if grad_scale == 1.0 else grad.mul_(grad_scale)


def copy_out(shard: Shard) -> None:
    """Round the updated master into the parameters, segment by segment so that padding stays zero."""
    if shard.param_out is None:
        return
    for segment in shard.segments:
        run = slice(segment.offset, segment.offset + segment.numel)
        shard.param_out[run].copy_(shard.master[run])


def runs(flat: Tensor, segments: Sequence[Segment]) -> list[Tensor]:
    """Return the views of `flat` that the segments name."""
    return [flat[segment.offset : segment.offset + segment.numel] for segment in segments]


def as_float(value: Any) -> float:
    """Return a hyper-parameter as a number; torch allows a tensor for lr."""
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)
