"""Places of parameters and optimizer states between their uses, from a ds_config and a device."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from ..config.offload import OffloadOptimizerConfig, OffloadParamConfig
from ..config.zero import ZeroConfig
from ..errors import ConfigError
from ..optimizers.registry import ELEMENTWISE
from .stage_policy import Placement, Policy

_SECTION = "zero_optimization"


class MemoryKind(Enum):
    """The memory that holds a value between its uses."""

    GPU = "gpu"  # the memory of the device that computes, host memory where there is no accelerator
    CPU = "cpu"  # pinned host memory
    NVME = "nvme"  # a file on a local disk


_MEMORY_KINDS = {"none": MemoryKind.GPU, "cpu": MemoryKind.CPU, "nvme": MemoryKind.NVME}


@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """The place of one kind of value between its uses."""

    kind: MemoryKind = MemoryKind.GPU
    pin_memory: bool = False
    nvme_path: Path | None = None

    @property
    def is_away(self) -> bool:
        """True if values lie outside the memory of the device that computes."""
        return self.kind is not MemoryKind.GPU


ON_DEVICE = Residence()


class StepAt(Enum):
    """When states in host memory are updated."""

    STEP = "step"  # the device waits
    # during the backward of the last micro batch: needs a second set of states in host memory
    BACKWARD = "backward"
    NEXT = "next"  # during the next forward and backward: needs a second set of gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """Plan that follows from a ds_config and a device."""

    # states of the optimizer, and float32 masters where parameters have another dtype or lie elsewhere
    states: Residence = ON_DEVICE
    parameters: Residence = ON_DEVICE
    # fraction of the trained elements whose states are offloaded; the rest stays on the device
    share: float = 1.0
    has_host: bool = False  # True if the device that computes has memory of its own, apart from the host's
    step_at: StepAt = StepAt.STEP
    warmup_steps: int = 0  # number of first steps that run as StepAt.STEP although StepAt.NEXT was asked for

    @property
    def uses_disk(self) -> bool:
        """True if any value lies on a disk."""
        return MemoryKind.NVME in (self.states.kind, self.parameters.kind)


def plan_offload(
    zero: ZeroConfig,
    policy: Policy,
    device: torch.device,
    *,
    optimizer: str | None,
    states_may_leave: bool,
    steps_on_host: bool,
    is_lenient: bool = False,
) -> OffloadPlan:
    """Return the plan of `offload_optimizer` and `offload_param`, for an optimizer of this name.

    `states_may_leave`: the states may leave the device between steps; `steps_on_host`: the optimizer can step
    them in host memory, part by part.
    `is_lenient`: at a stage that does not shard these values the sections have no effect, as with
    DeepSpeed, and a warning says so.
    Errors: ConfigError at a stage that does not shard these values, or for an optimizer that cannot
    step part by part
    """
    if is_lenient:
        zero = _without_effect(zero, policy)
    if zero.offload_param.is_on and policy.parameters is not Placement.SHARDED:
        raise ConfigError(
            f'{_SECTION}.offload_param.device "{zero.offload_param.device}": at stage {policy.stage} every '
            "rank has all parameters at all times; write stage 3"
        )
    states = (
        ON_DEVICE if optimizer is None else _residence("offload_optimizer", zero.offload_optimizer, device)
    )
    asked = zero.offload_optimizer.device
    if optimizer is not None and asked != "none":
        if policy.optimizer is not Placement.SHARDED:
            raise ConfigError(
                f'{_SECTION}.offload_optimizer.device "{asked}": at stage {policy.stage} every rank has all '
                "optimizer states, and they stay where they are; write stage 1, 2 or 3"
            )
        if states.is_away and not states_may_leave:
            raise ConfigError(
                f'{_SECTION}.offload_optimizer.device "{asked}": {optimizer} may compute with several '
                "parameters at once, and here they would be stepped one after the other; leave "
                "offload_optimizer out, or, if it steps each parameter by itself, say so with a class "
                "attribute is_per_parameter = True"
            )
    key, step_at = _step_at(zero)
    if step_at is not StepAt.STEP and optimizer is not None:
        if states.is_away and not steps_on_host:
            *names, last = [name for row in ELEMENTWISE for name in row.names]
            raise ConfigError(
                f"{_SECTION}.offload_optimizer.{key} true: {optimizer} steps on the device, and this is for "
                f"optimizers that step on the host, which {', '.join(names)} and {last} do; choose one of "
                "these, or leave it out"
            )
        if policy.gradients is not Placement.SHARDED:
            raise ConfigError(
                f"{_SECTION}.offload_optimizer.{key} true: at stage {policy.stage} every rank keeps "
                "whole gradients until the step; write stage 2 or 3, or leave it out"
            )
        if not states.is_away:
            logging.getLogger("dslaunch").warning(
                "%s.offload_optimizer.%s has no effect: this run is on CPUs, where nothing is offloaded",
                _SECTION,
                key,
            )
            step_at = StepAt.STEP
    return OffloadPlan(
        step_at=step_at if optimizer is not None else StepAt.STEP,
        warmup_steps=zero.offload_optimizer.delayed_update.warmup_steps,
        states=states,
        parameters=_residence("offload_param", zero.offload_param, device),
        share=zero.offload_optimizer.ratio,
        has_host=has_memory_of_its_own(device),
    )


def _without_effect(zero: ZeroConfig, policy: Policy) -> ZeroConfig:
    """Return the section without those parts that have nothing to offload at this stage."""
    idle: dict[str, object] = {}
    if zero.offload_param.is_on and policy.parameters is not Placement.SHARDED:
        idle["offload_param"] = OffloadParamConfig()
    if zero.offload_optimizer.is_on and policy.optimizer is not Placement.SHARDED:
        idle["offload_optimizer"] = OffloadOptimizerConfig()
    for name in idle:
        logging.getLogger("dslaunch").warning(
            "%s.%s has no effect at stage %d, where every rank has all of it", _SECTION, name, policy.stage
        )
    return zero.model_copy(update=idle)


def _step_at(zero: ZeroConfig) -> tuple[str, StepAt]:
    """Return the key that sets when states are updated, and its value."""
    if zero.offload_optimizer.super_offload:
        return "super_offload", StepAt.BACKWARD
    is_delayed = zero.offload_optimizer.delayed_update.enabled
    return "delayed_update.enabled", StepAt.NEXT if is_delayed else StepAt.STEP


def _residence(section: str, wanted: OffloadParamConfig, device: torch.device) -> Residence:
    kind = _MEMORY_KINDS[wanted.device]
    if kind is MemoryKind.CPU and not has_memory_of_its_own(device):
        logging.getLogger("dslaunch").info(
            '%s.%s.device "cpu" has no effect: this run is on CPUs, so all is in host memory',
            _SECTION,
            section,
        )
        return ON_DEVICE
    if kind is MemoryKind.GPU:
        return ON_DEVICE
    path = wanted.nvme_path if kind is MemoryKind.NVME else None
    return Residence(
        kind=kind,
        pin_memory=wanted.pin_memory and device.type == "cuda",
        nvme_path=None if path is None else Path(path),
    )


def has_memory_of_its_own(device: torch.device) -> bool:
    """Tell whether this device is an accelerator, whose memory is not the host's."""
    return device.type != "cpu"
