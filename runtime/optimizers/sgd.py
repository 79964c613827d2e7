"""SGD, with momentum or without."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...kernels import SgdSegment, SgdShard, cuda, sgd_step
from .formula import FlatArrays, Formula, Group, Pieces, Run
from .on_device import as_float

_BUFFER = "momentum_buffer"


class SgdFormula(Formula):
    """As torch.optim.SGD without maximize: L2 weight decay, momentum with dampening or after Nesterov.

    The first step leaves the gradient itself in the buffer, without dampening.
    """

    state_names = (_BUFFER,)

    def names_for(self, groups: Iterable[Group]) -> tuple[str, ...]:
        """Without momentum there is nothing to remember."""
        return self.state_names if any(group["momentum"] for group in groups) else ()

    def segment(self, run: Run) -> SgdSegment:
        """As SGD's kernel takes it."""
        return SgdSegment(
            offset=run.offset,
            numel=run.numel,
            lr=as_float(run.group["lr"]),
            weight_decay=as_float(run.group["weight_decay"]),
            momentum=as_float(run.group["momentum"]),
            dampening=as_float(run.group["dampening"]),
            nesterov=bool(run.group["nesterov"]),
            step=run.step,
        )

    def shard(self, one: FlatArrays, segments: list[SgdSegment]) -> SgdShard:
        """As SGD's kernel takes it."""
        return SgdShard(
            param=one.param,
            grads=one.grads,
            param_out=one.param_out,
            momentum_buffer=one.states.get(_BUFFER),
            segments=segments,
        )

    def call(self, shards: list[SgdShard], grad_scale: float) -> None:
        """SGD."""
        sgd_step(shards, grad_scale=grad_scale)

    def call_on_device(self, shards: list[SgdShard], grad_scale: float, stream: int) -> None:
        """SGD."""
        cuda.sgd_step(shards, grad_scale=grad_scale, stream=stream)

    def foreach(self, pieces: Pieces) -> None:
        """Update with torch's operations."""
        group, updates = pieces.group, pieces.grads
        weight_decay, momentum = as_float(group["weight_decay"]), as_float(group["momentum"])
        if weight_decay:
            updates = list(torch._foreach_add(updates, pieces.params, alpha=weight_decay))
        if momentum:
            buffers = pieces.states[_BUFFER]
            is_first = pieces.step == 1
            torch._foreach_mul_(buffers, 0.0 if is_first else momentum)
            torch._foreach_add_(buffers, updates, alpha=1.0 if is_first else 1 - as_float(group["dampening"]))
            updates = (
                list(torch._foreach_add(updates, buffers, alpha=momentum)) if group["nesterov"] else buffers
            )
        torch._foreach_add_(pieces.params, updates, alpha=-as_float(group["lr"]))
