"""Planted faults: each breaks one thing in the engine, while a training goes on in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from dslaunch.runtime.comm.pending import Pending
from dslaunch.runtime.engine import optimizer_step
from dslaunch.runtime.engine.step_engine import StepEngine
from dslaunch.runtime.mesh.domain import Domains
from dslaunch.runtime.step.fused_rule import FusedRule
from dslaunch.runtime.zero.gradients.sharded_gradients import ShardedGradients
from dslaunch.runtime.zero.model.sharded_model import ShardedModel
from dslaunch.runtime.zero.units.sub_buffer import SubBuffer
from tests.runtime.numerics.trainings import ACCUMULATED, SGD, by_config, of_client, of_layout, of_pipeline
from tests.runtime.training.axes import Layout

BROKEN = "blocks.1.0.weight"  # a parameter whose gradient or value some faults break


@contextmanager
def dropped_gradient() -> Iterator[None]:
    """On rank 1 one parameter's gradient does not come into the average."""
    hand_in = ShardedGradients.hand_in

    def broken(self: ShardedGradients, index: int) -> None:
        hand_in(self, index)
        if dist.get_rank() == 1 and self._names[index] == BROKEN:
            self._whole.views[index].zero_()

    with patch.object(ShardedGradients, "hand_in", broken):
        yield


@contextmanager
def scaled(factor: float) -> Iterator[None]:
    """All gradients are too large by this factor."""
    enlarged = StepEngine._enlarged
    with patch.object(StepEngine, "_enlarged", lambda self, loss: enlarged(self, loss) * factor):
        yield


@contextmanager
def frozen_part() -> Iterator[None]:
    """The optimizer leaves one parameter as it is."""
    segments = SubBuffer.segments

    def broken(self: SubBuffer) -> Any:
        index = next((place for place, one in enumerate(self.members) if one.name == BROKEN), None)
        if index is None:
            return segments(self)
        plan, frozen = self.plan, self.optimizer_shard
        return self.layout.segments_of(
            plan.shard_index, num_shards=plan.num_shards, frozen={index}, missed=frozen.missed
        )

    with patch.object(SubBuffer, "segments", broken):
        yield


@contextmanager
def tied_part_twice() -> Iterator[None]:
    """The gradient of a layer that two stages share counts twice."""
    add = Domains.add

    def broken(self: Domains, name: str, **options: Any) -> Any:
        if name.startswith("tied"):
            options["divisor"] = options["divisor"] / 2
        return add(self, name, **options)

    with patch.object(Domains, "add", broken):
        yield


@contextmanager
def wrong_group() -> Iterator[None]:
    """Gradients are averaged over two of four ranks."""
    add = Domains.add

    def broken(self: Domains, name: str, **options: Any) -> Any:
        return add(self, name, **{**options, "sharers": [(0, 1), (2, 3)]})

    with patch.object(Domains, "add", broken):
        yield


@contextmanager
def no_clip() -> Iterator[None]:
    with patch.object(optimizer_step, "clip_factor", lambda norm, *, max_norm: 1.0):
        yield


@contextmanager
def last_micro_batch_only() -> Iterator[None]:
    """Each micro batch's gradients take the place of the earlier ones'."""
    keep = ShardedGradients.keep

    def broken(self: ShardedGradients) -> None:
        self._is_zero = True
        keep(self)

    with patch.object(ShardedGradients, "keep", broken):
        yield


@contextmanager
def wrong_lr_of_a_group() -> Iterator[None]:
    """The second group is stepped with the first one's learning rate."""
    step = FusedRule.step

    def broken(self: FusedRule, groups: Any, **options: Any) -> None:
        first, second = groups
        step(self, [first, {**second, "lr": first["lr"]}], **options)

    with patch.object(FusedRule, "step", broken):
        yield


@contextmanager
def stale_parameter() -> Iterator[None]:
    """One unit's new values are not sent to the other ranks."""
    publish = ShardedModel.publish

    def broken(self: ShardedModel, sub_buffer: SubBuffer) -> Pending:
        if any(one.name == BROKEN for one in sub_buffer.members):
            return Pending.done()
        return publish(self, sub_buffer)

    with patch.object(ShardedModel, "publish", broken):
        yield


@contextmanager
def norm_without_a_stage() -> Iterator[None]:
    """The norm is that of the first stage alone."""
    norm_of_all = optimizer_step.global_grad_norm

    def broken(trained: Any, *args: Any, **options: Any) -> Any:
        return norm_of_all(trained if dist.get_rank() == 0 else (), *args, **options)

    with patch.object(optimizer_step, "global_grad_norm", broken):
        yield


@contextmanager
def wrong_step_of_adam() -> Iterator[None]:
    """The moments are corrected as in the step after this one."""
    update = FusedRule.step

    def broken(self: FusedRule, groups: Any, *, step: int, **options: Any) -> None:
        update(self, groups, step=step + 1, **options)

    with patch.object(FusedRule, "step", broken):
        yield


@contextmanager
def lost_moment() -> Iterator[None]:
    """Adam forgets a moment of one parameter after each step."""
    step = FusedRule.step

    def broken(self: FusedRule, groups: Any, **options: Any) -> None:
        step(self, groups, **options)
        for sub_buffer in self._sub_buffers:
            for index, member in enumerate(sub_buffer.members):
                if member.name == BROKEN:
                    nothing = torch.zeros(sub_buffer.whole_shape(index))
                    sub_buffer.copy_fragment(index, nothing, sub_buffer.optimizer_shard.states["exp_avg"])

    with patch.object(FusedRule, "step", broken):
        yield


@contextmanager
def other_weights_in_forward() -> Iterator[None]:
    """In every forward after the first step rank 1 computes with a weight that is a little off."""
    forward = StepEngine.forward

    def broken(self: Any, *args: Any, **options: Any) -> Any:
        wrong = dist.get_rank() == 1 and self.global_steps > 0
        weight = self.module.last.weight
        with torch.no_grad():
            weight.data.mul_(1.001 if wrong else 1.0)
        output = forward(self, *args, **options)
        with torch.no_grad():
            weight.data.div_(1.001 if wrong else 1.0)
        return output

    with patch.object(StepEngine, "forward", broken):
        yield


class Fault(NamedTuple):
    """A planted fault: in which training, and what is to be found."""

    plant: Callable[[], Any]
    size: int
    training: Callable[..., None]
    arguments: tuple[Any, ...]
    found: tuple[int, str, str]  # step, quantity, name of the parameter
    hint: str = ""


_SGD = {"optimizer": SGD}
FAULTS = {
    "dropped gradient": Fault(
        dropped_gradient, 2, by_config, ({"stage": 2, **_SGD},), (1, "gradient", BROKEN)
    ),
    "scale": Fault(
        partial(scaled, 1.5),
        2,
        by_config,
        ({"stage": 3},),
        (1, "gradient", "first.weight"),
        "the whole gradient is 1.5 times that of the other",
    ),
    "small scale in 16 bits": Fault(
        partial(scaled, 1.02),
        2,
        by_config,
        ({"stage": 2, "bf16": {"enabled": True}},),
        (1, "gradient", "first.weight"),
    ),
    "frozen part": Fault(
        frozen_part,
        2,
        by_config,
        ({"stage": 1},),
        (1, "parameter", BROKEN),
        "the whole change is 0 as configured",
    ),
    "tied part trained twice": Fault(
        tied_part_twice,
        2,
        of_pipeline,
        (),
        (1, "gradient", "tied_modules.embed.weight"),
        "the whole gradient is 2 times that of the other",
    ),
    "wrong group": Fault(wrong_group, 4, by_config, ({"stage": 0},), (1, "gradient", "first.weight")),
    "no clip": Fault(
        no_clip,
        2,
        by_config,
        ({"stage": 2, "gradient_clipping": 0.1, **_SGD},),
        (1, "parameter", "first.weight"),
    ),
    "accumulation left out": Fault(
        last_micro_batch_only,
        2,
        by_config,
        ({"stage": 2, **ACCUMULATED},),
        (1, "gradient", "first.weight"),
    ),
    "wrong learning rate of a group": Fault(
        wrong_lr_of_a_group,
        2,
        of_client,
        (1, partial(torch.optim.AdamW, lr=0.01)),
        (1, "parameter", "first.bias"),
        "",
    ),
    "lost moment": Fault(lost_moment, 2, by_config, ({"stage": 2},), (1, "state", f"exp_avg/{BROKEN}")),
    "stale parameter": Fault(stale_parameter, 2, by_config, ({"stage": 1},), (1, "parameter", BROKEN)),
    "norm without a stage": Fault(
        norm_without_a_stage, 2, of_layout, (Layout(pp=2, dp=1, stage=0),), (1, "norm", "")
    ),
    "step of Adam": Fault(
        wrong_step_of_adam, 2, by_config, ({"stage": 2},), (1, "parameter", "first.weight")
    ),
    "forward with other weights": Fault(
        other_weights_in_forward, 2, by_config, ({"stage": 0, **_SGD},), (2, "loss", "")
    ),
}
