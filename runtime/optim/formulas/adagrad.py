"""Adagrad: every element's step is divided by the root of the sum of its squared gradients."""

from __future__ import annotations

import torch

from ....kernels import AdagradSegment, AdagradShard, adagrad_step, cuda
from ..numbers import as_float
from .formula import FlatArrays, Formula, Pieces, Run


class AdagradFormula(Formula):
    """Update sum += g * g; p -= lr * g / (sqrt(sum) + eps), with L2 weight decay in g.

    Source: Duchi et al. 2011, "Adaptive subgradient methods"; as torch.optim.Adagrad without maximize, with lr / (1 + (step - 1) * lr_decay)
            where a group has lr_decay
    """

    state_names = ("sum",)

    def segment(self, run: Run) -> AdagradSegment:
        """As Adagrad's kernel takes it."""
        return AdagradSegment(
            offset=run.offset,
            numel=run.numel,
            lr=as_float(run.group["lr"]),
            weight_decay=as_float(run.group["weight_decay"]),
            lr_decay=as_float(run.group.get("lr_decay", 0.0)),
            eps=as_float(run.group["eps"]),
            step=run.step,
        )

    def shard(self, one: FlatArrays, segments: list[AdagradSegment]) -> AdagradShard:
        """As Adagrad's kernel takes it."""
        return AdagradShard(
            param=one.param,
            grads=one.grads,
            param_out=one.param_out,
            sum=one.states["sum"],
            segments=segments,
        )

    def call(self, shards: list[AdagradShard], grad_scale: float) -> None:
        """Adagrad."""
        adagrad_step(shards, grad_scale=grad_scale)

    def call_on_device(self, shards: list[AdagradShard], grad_scale: float, stream: int) -> None:
        """Adagrad."""
        cuda.adagrad_step(shards, grad_scale=grad_scale, stream=stream)

    def foreach(self, pieces: Pieces) -> None:
        """Update with torch's operations."""
        group, grads, sums = pieces.group, pieces.grads, pieces.states["sum"]
        weight_decay = as_float(group["weight_decay"])
        if weight_decay:
            grads = list(torch._foreach_add(grads, pieces.params, alpha=weight_decay))
        torch._foreach_addcmul_(sums, grads, grads, 1.0)
        roots = torch._foreach_sqrt(sums)
        torch._foreach_add_(roots, as_float(group["eps"]))
        lr = as_float(group["lr"]) / (1 + (pieces.step - 1) * as_float(group.get("lr_decay", 0.0)))
        torch._foreach_addcdiv_(pieces.params, grads, roots, -lr)
