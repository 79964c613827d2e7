"""The factor that keeps float16 gradients out of the range where they become zero.

The loss is multiplied by it before the backward, and the gradients are divided by it at the step. A step
whose gradients are not finite is skipped, and the scale may change.
Source: DeepSpeed 0.19.8 runtime/fp16/loss_scaler.py, `DynamicLossScaler`: the same sequence of scales
"""

from __future__ import annotations

from math import inf
from typing import Any

from ..config.precision import Fp16Config
from ..errors import ConfigError, LossScaleError


class LossScaler:
    """Loss scale: constant if the config sets a loss_scale above 0, 1 without fp16, else following the
    gradients.

    Programs find this object as `optimizer.loss_scaler`, and without ZeRO as `optimizer.loss_scale_config`,
    as in DeepSpeed.
    """

    scale_factor = 2.0

    def __init__(self, config: Fp16Config) -> None:
        self._config = config
        self.is_dynamic = config.enabled and config.loss_scale == 0.0
        if not config.enabled:
            self.scale = 1.0
        else:
            self.scale = 2.0**config.initial_scale_power if self.is_dynamic else config.loss_scale
        self._num_steps = 0
        self._last_overflow = -1  # step of the last overflow
        self._num_left = config.hysteresis  # 1: the next overflow halves the scale; 2: the one after it

    @property
    def cur_scale(self) -> float:
        return self.scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        """Errors: ConfigError unless it is a number above 0"""
        is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not is_number or not 0.0 < scale < inf:
            raise ConfigError(f"loss scale {scale!r}: must be a number above 0; set e.g. 1024.0")
        self.scale = float(scale)

    @property
    def loss_scale(self) -> float:
        return self.scale

    @property
    def dynamic(self) -> bool:
        return self.is_dynamic

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.is_dynamic

    @property
    def use_grad_scaling(self) -> bool:
        return self._config.enabled

    @property
    def cur_iter(self) -> int:
        return self._num_steps

    @property
    def last_overflow_iter(self) -> int:
        return self._last_overflow

    @property
    def scale_window(self) -> int:
        return self._config.loss_scale_window

    @property
    def min_scale(self) -> float:
        return self._config.min_loss_scale

    @property
    def min_loss_scale(self) -> float:
        return self._config.min_loss_scale

    @property
    def delayed_shift(self) -> int:
        return self._config.hysteresis

    @property
    def cur_hysteresis(self) -> int:
        return self._num_left

    @property
    def consecutive_hysteresis(self) -> bool:
        return self._config.consecutive_hysteresis

    def update(self, *, is_overflow: bool) -> None:
        """Update the scale after a step; `is_overflow`: its gradients were not finite.

        Errors: LossScaleError if the scale would have to be halved and already has its minimum
        """
        if not self.is_dynamic:
            return
        step, self._num_steps = self._num_steps, self._num_steps + 1
        if is_overflow:
            self._last_overflow = step
            self._shrink()
        else:
            self._grow(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the values that a checkpoint keeps."""
        return {
            "scale": self.scale,
            "num_steps": self._num_steps,
            "last_overflow": self._last_overflow,
            "num_left": self._num_left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over saved values, unless the scale is constant in this run."""
        if self.is_dynamic:
            self.scale = float(state["scale"])
            self._num_steps = int(state["num_steps"])
            self._last_overflow = int(state["last_overflow"])
            self._num_left = int(state["num_left"])

    def _shrink(self) -> None:
        config = self._config
        if config.hysteresis != 1 and self._num_left != 1:
            self._num_left -= 1
            return
        if self.scale <= config.min_loss_scale:
            raise LossScaleError(
                f"Current loss scale already at minimum ({config.min_loss_scale:g}), and the "
                "gradients are still not finite; lower the learning rate, look for inf and NaN in the "
                "data, or train in bf16"
            )
        self.scale = max(self.scale / self.scale_factor, config.min_loss_scale)

    def _grow(self, step: int) -> None:
        config = self._config
        if config.consecutive_hysteresis:
            self._num_left = config.hysteresis
        num_stable = step - self._last_overflow - 1
        if num_stable > 0 and num_stable % config.loss_scale_window == 0:
            if not config.consecutive_hysteresis:
                self._num_left = config.hysteresis
            self.scale *= self.scale_factor
