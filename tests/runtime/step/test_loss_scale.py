"""The sequence of loss scales: DeepSpeed's, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from dslaunch.runtime.config.precision import Fp16Config
from dslaunch.runtime.errors import LossScaleError
from dslaunch.runtime.step.loss_scale import LossScaler


def _scaler(**changes: Any) -> LossScaler:
    values = {"initial_scale_power": 4, "loss_scale_window": 3, "hysteresis": 1, **changes}
    return LossScaler(Fp16Config.model_validate({"enabled": True, **values}))


def _trace(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step; "." is a good one, "x" one with inf or NaN."""
    scales = []
    for step in steps:
        scaler.update(is_overflow=step == "x")
        scales.append(scaler.scale)
    return scales


# Worked out by hand from the sequence of comparisons in DeepSpeed's DynamicLossScaler.
@pytest.mark.parametrize(
    ("changes", "steps", "scales"),
    [
        # the first doubling comes after window + 1 good steps, the next ones after window
        ({}, ".......", [16, 16, 16, 32, 32, 32, 64]),
        ({}, "x", [8]),
        ({}, "xx....", [8, 4, 4, 4, 4, 8]),  # and so it is after an overflow
        ({"hysteresis": 2}, "xxx", [16, 8, 4]),  # one is forgiven
        ({"hysteresis": 2}, "x.x", [16, 16, 8]),  # and a good step does not renew that
        ({"hysteresis": 2}, "x....x.x", [16, 16, 16, 16, 32, 32, 32, 16]),  # doubling does
        ({"hysteresis": 2, "consecutive_hysteresis": True}, "x.x.xx", [16, 16, 16, 16, 16, 8]),
        ({"loss_scale": 128}, "x.x....", [128] * 7),
        ({"min_loss_scale": 5}, "xx", [8, 5]),
    ],
)
def test_the_scale_follows_the_gradients(changes: dict[str, Any], steps: str, scales: list[float]) -> None:
    assert _trace(_scaler(**changes), steps) == scales


def test_below_the_minimum_there_is_no_way_on() -> None:
    scaler = _scaler(initial_scale_power=1)
    assert _trace(scaler, "x") == [1]
    with pytest.raises(LossScaleError, match=r"Current loss scale already at minimum \(1\)"):
        scaler.update(is_overflow=True)
    assert scaler.scale == 1


def test_without_fp16_the_scale_is_one_for_good() -> None:
    scaler = LossScaler(Fp16Config())
    assert _trace(scaler, "x.x") == [1, 1, 1]
    assert not scaler.is_dynamic


def test_a_saved_scale_goes_on_where_it_was() -> None:
    first, second = _scaler(hysteresis=2), _scaler(hysteresis=2)
    _trace(first, "x..")
    second.load_state_dict(first.state_dict())
    assert _trace(second, ".x...x") == _trace(first, ".x...x")
    constant = _scaler(loss_scale=7)
    constant.load_state_dict(first.state_dict())
    assert constant.scale == 7
