"""Adam and AdamW over flat shards: the fused kernels of dslaunch; torch's on a GPU where ours cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels import AdamSegment, AdamShard, adamw_step, cuda
from ..comm.collectives import Collectives
from ..offload.pipeline import Ready, StepPipeline
from ..zero.layout import Segment
from ..zero.sub_buffer import SubBuffer
from .on_device import step_on_device
from .rule import AfterPart, ByName, Groups, as_float, runs, scaled_grad

_STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """This rank's shard of one sub-buffer, or a run of it."""

    master: Tensor  # [n] float32, updated in place
    grads: tuple[
        tuple[int, Tensor], ...
    ]  # where each piece begins, [k] float32, bfloat16 or float16; may be overwritten
    param_out: (
        Tensor | None
    )  # [n] of the parameters' dtype, the rounded copy to write; None: `master` is the parameter
    exp_avg: Tensor  # [n] float32, as the next
    exp_avg_sq: Tensor
    segments: tuple[Segment, ...]  # which optimizer group owns what; elements outside stay as they are


class AdamRule:
    """AdamW, or Adam with L2 weight decay where `adam_w_mode` is false."""

    def __init__(self, *, adam_w_mode: bool) -> None:
        self.adam_w_mode = adam_w_mode
        self.name = "AdamW" if adam_w_mode else "Adam"
        self.steps_by_part = True
        self._parts: tuple[SubBuffer, ...] = ()

    def attach(self, parts: Sequence[SubBuffer], groups: Groups, comm: Collectives) -> None:
        """Allocate the moments."""
        self._parts = tuple(parts)
        self.reset_states(_STATES)

    def reset_states(self, names: Sequence[str]) -> None:
        """There are always the same."""
        for part in self._parts:
            part.allocate_states(_STATES)

    def beside(self) -> ByName:
        """Nothing."""
        return {}

    def load_beside(self, saved: ByName) -> None:
        """Nothing."""

    def step(self, groups: Groups, *, step: int, grad_scale: float, after_part: AfterPart | None) -> None:
        """Update part by part, so that one part's parameters can travel while the next is updated."""
        update = self.part_update(groups, step=step, grad_scale=grad_scale)
        StepPipeline(self._parts).run(update, after_part=after_part)

    def part_update(self, groups: Groups, *, step: int, grad_scale: float) -> Callable[[Ready], None]:
        """Return what a step does to one part."""

        def update(ready: Ready) -> None:
            self.update(_shard_of(ready), groups, step=step, grad_scale=grad_scale)

        return update

    def update(
        self, shard: Shard, groups: Sequence[Mapping[str, Any]], *, step: int, grad_scale: float
    ) -> None:
        """Apply one step to the shard."""
        arrays = [_for_kernel(shard, groups, step)]
        options: dict[str, Any] = {"grad_scale": grad_scale, "adam_w_mode": self.adam_w_mode}
        if not shard.master.is_cuda:
            adamw_step(arrays, **options)
        elif not step_on_device(cuda.adamw_step, arrays, device=shard.master.device, **options):
            self.update_with_torch(shard, groups, step=step, grad_scale=grad_scale)

    def update_with_torch(
        self, shard: Shard, groups: Sequence[Mapping[str, Any]], *, step: int, grad_scale: float
    ) -> None:
        """Apply one step with torch's fused kernel, on any device.

        It wants a gradient of the master's dtype, so a 16-bit one costs 4 more bytes per element for the moment.
        """
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for offset, piece in shard.grads:
            grad = scaled_grad(piece, grad_scale)
            for segment in shard.segments:
                start = max(segment.offset, offset)
                stop = min(segment.offset + segment.numel, offset + grad.numel())
                if start >= stop:
                    continue
                run, group = slice(start, stop), groups[segment.group]
                kernel(
                    [shard.master[run]],
                    [grad[start - offset : stop - offset]],
                    [shard.exp_avg[run]],
                    [shard.exp_avg_sq[run]],
                    [],
                    [torch.tensor(float(step), device=grad.device)],
                    lr=as_float(group["lr"]),
                    beta1=as_float(group["betas"][0]),
                    beta2=as_float(group["betas"][1]),
                    weight_decay=as_float(group["weight_decay"]),
                    eps=as_float(group["eps"]),
                    amsgrad=False,
                    maximize=False,
                )
        _copy_out(shard)


def _copy_out(shard: Shard) -> None:
    """Round the updated master into the parameters, segment by segment so that padding stays zero."""
    if shard.param_out is not None:
        pairs = zip(runs(shard.param_out, shard.segments), runs(shard.master, shard.segments), strict=True)
        for param, master in pairs:
            param.copy_(master)


def _shard_of(ready: Ready) -> Shard:
    return Shard(
        master=ready.master,
        grads=ready.grads,
        param_out=ready.param_out,
        exp_avg=ready.states["exp_avg"],
        exp_avg_sq=ready.states["exp_avg_sq"],
        segments=ready.part.segments(),
    )


def _for_kernel(shard: Shard, groups: Sequence[Mapping[str, Any]], step: int) -> AdamShard:
    return AdamShard(
        param=shard.master,
        grads=shard.grads,
        exp_avg=shard.exp_avg,
        exp_avg_sq=shard.exp_avg_sq,
        segments=[_segment(one.offset, one.numel, groups[one.group], step) for one in shard.segments],
        param_out=shard.param_out,
    )


def _segment(offset: int, numel: int, group: Mapping[str, Any], step: int) -> AdamSegment:
    beta1, beta2 = group["betas"]
    return AdamSegment(
        offset=offset,
        numel=numel,
        lr=as_float(group["lr"]),
        beta1=as_float(beta1),
        beta2=as_float(beta2),
        eps=as_float(group["eps"]),
        weight_decay=as_float(group["weight_decay"]),
        step=step,
    )
