"""The optimizer that programs for DeepSpeed get, with what they read on DeepSpeed's ZeRO optimizers.

Source: DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer`, and stage3.py,
        `DeepSpeedZeroOptimizer_Stage3`;
runtime/fp16/fused_optimizer.py, `FP16_Optimizer`
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...engine.base import EngineBase
from ...errors import CheckpointError, ConfigError
from ...step.flat_optimizer import FlatOptimizer
from ...step.loss_scale import LossScaler
from .trl_hooks import Hooks

_SHARDS = (
    "several parameters share a flat unit here, which is cut differently; read and write one parameter's "
    "values with safe_get_full_fp32_param(), safe_get_full_grad(), safe_get_full_optimizer_state() and the "
    "functions beside them"
)
_ABSENT = {
    **dict.fromkeys(
        [
            "averaged_gradients",
            "bit16_groups_flat",
            "fp16_groups_flat",
            "fp16_partitioned_groups",
            "fp16_partitioned_groups_flat",
            "fp32_groups_flat",
            "fp32_groups_flat_partition",
            "fp32_partitioned_groups_flat",
            "parallel_partitioned_bit16_groups",
            "params_in_partition",
            "single_partition_of_fp32_groups",
        ],
        _SHARDS,
    ),
    "backward": "call engine.backward()",
    "external_loss_scale": "set optimizer.loss_scale",
    "override_loss_scale": "set optimizer.loss_scale",
    "refresh_fp32_params": "call safe_set_full_fp32_param() for each parameter that was changed",
    "reduce_gradients": "engine.backward() and engine.step() average",
}


class BaseOptimizer(torch.optim.Optimizer):
    """Value of `optimizer.optimizer` where the ds_config names the optimizer: the same groups,
    and no step of its own.
    """

    def __init__(self, outer: DeepSpeedOptimizer) -> None:
        super().__init__(outer.param_groups, outer.defaults)
        self.param_groups = outer.param_groups  # the very list, so that an lr set here counts
        self._is_made = True
        self._outer_state_dict: Callable[[], dict[str, Any]] = outer.state_dict
        self.state = outer.state_dict()["state"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the flat units are laid out."""
        if hasattr(self, "_is_made"):
            raise ConfigError(
                "add_param_group() after initialize() is not supported; give initialize() all groups"
            )
        self.param_groups.append(param_group)

    def step(self, closure: object = None) -> NoReturn:
        """Refuse: gradients would not be averaged."""
        raise ConfigError("optimizer.optimizer.step() was called; call engine.step(), which steps")

    def zero_grad(self, set_to_none: bool = True) -> NoReturn:
        """Refuse: gradients do not lie in the parameters at every stage."""
        raise ConfigError("optimizer.optimizer.zero_grad() was called; call engine.zero_grad()")

    def state_dict(self) -> dict[str, Any]:
        return self._outer_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> NoReturn:
        """Refuse: a rank holds shards only."""
        raise CheckpointError(
            "optimizer.optimizer.load_state_dict() has no whole state; use engine.load_checkpoint()"
        )


class DeepSpeedOptimizer(FlatOptimizer):
    """A `FlatOptimizer` by DeepSpeed's names."""

    _mover: weakref.ref[EngineBase] | None = None

    @cached_property
    def parameter_offload(self) -> Hooks:
        """Return the stand-in for the object that gathers parameters in DeepSpeed."""
        return Hooks()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The client's optimizer, which has the same groups; for one that the ds_config names,
        another view of these.
        """
        if self._client is None:
            self._client = BaseOptimizer(self)
        return self._client

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The object that decides the loss scale; None before initialize() has returned."""
        return self._scaler

    @property
    def loss_scale_config(self) -> LossScaler | None:
        """The loss scaler, by its name without ZeRO."""
        return self._scaler

    @property
    def loss_scale(self) -> float:
        """Factor of losses before backward; 1 without fp16."""
        return 1.0 if self._scaler is None else self._scaler.scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if self._scaler is not None:
            self._scaler.cur_scale = scale

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return self._scaler is not None and self._scaler.is_dynamic

    def needs_scaler(self) -> bool:
        """Return whether the loss is scaled by a number that follows the gradients."""
        return self.dynamic_loss_scale

    @property
    def bit16_groups(self) -> list[list[Tensor]]:
        """The parameters that are trained, by group."""
        return [[one for one in group["params"] if one.requires_grad] for group in self.param_groups]

    fp16_groups = bf16_groups = bit16_groups

    def get_lr(self) -> float:
        """Return the first group's learning rate."""
        lr: float = self.param_groups[0]["lr"]
        return lr

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Return whether any rank's gradients are infinite or NaN.

        Order: a collective
        """
        return self._look_for_overflow is not None and self._look_for_overflow()

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Set `overflow` to the result of `has_overflow`.

        Order: a collective
        """
        self.overflow = self.has_overflow()

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Move states to host memory: engine.offload_states()."""
        self._moving.offload_states(*args, **kwargs)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Call engine.reload_states(), which brings states back."""
        self._moving.reload_states(non_blocking=non_blocking)

    @property
    def _moving(self) -> EngineBase:
        mover = None if self._mover is None else self._mover()
        if mover is None:
            raise ConfigError("the optimizer has no engine; call engine.offload_states() after initialize()")
        return mover

    def __getattr__(self, name: str) -> NoReturn:
        why = _ABSENT.get(name)
        if why is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name)
        raise AttributeError(f"optimizer.{name}, which DeepSpeed has, is not here: {why}", name=name)
