"""The conversions from and to bfloat16 inside a step, seen through steps that change nothing else.

With lr 0 the parameter stays as it is, so `param_out` is its rounded copy; with both betas 0 `exp_avg` becomes the
gradient, so a bfloat16 gradient is seen as float32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dslaunch.kernels import AdamSegment, AdamShard, adamw_step, adamw_step_reference

Step = Callable[..., None]


@pytest.fixture(params=[adamw_step, adamw_step_reference], ids=["fast", "plain"])
def step(request: pytest.FixtureRequest) -> Step:
    chosen: Step = request.param
    return chosen


def still(numel: int) -> tuple[AdamSegment, ...]:
    return (
        AdamSegment(offset=0, numel=numel, lr=0.0, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0, step=1),
    )


def rounded(step: Step, bits: np.ndarray) -> np.ndarray:
    """Return the bits of `param_out` for parameters with these bits."""
    param = torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())
    grad, exp_avg, exp_avg_sq = torch.zeros(3, len(bits)).unbind()
    out = torch.zeros(len(bits), dtype=torch.bfloat16)
    step(
        [
            AdamShard(
                param=param,
                grads=[(0, grad)],
                exp_avg=exp_avg,
                exp_avg_sq=exp_avg_sq,
                segments=still(len(bits)),
                param_out=out,
            )
        ]
    )
    return out.view(torch.int16).numpy().view(np.uint16)


def test_every_upper_half_rounds_to_the_nearest_and_ties_to_even(step: Step) -> None:
    upper = np.arange(2**16, dtype=np.int64)
    upper = upper[(upper & 0x7F80) != 0x7F80]  # finite
    for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        goes_up = (lower > 0x8000) | ((lower == 0x8000) & (upper % 2 == 1))
        want = upper + goes_up  # past the largest finite value this is infinity
        assert np.array_equal(rounded(step, (upper << 16) | lower), want)


def test_infinity_stays_infinity(step: Step) -> None:
    assert rounded(step, np.array([0x7F800000, 0xFF800000])).tolist() == [0x7F80, 0xFF80]


def test_every_nan_stays_a_nan_of_the_same_sign(step: Step) -> None:
    # Payloads whose bits lie in the lower half only, and those that rounding would carry into the sign.
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0x7FFF8000, 0xFF800001, 0xFFFFFFFF, 0xFF808000])
    got = rounded(step, nans)
    assert ((got & 0x7F80) == 0x7F80).all()
    assert ((got & 0x007F) != 0).all()
    assert (got >> 15 == nans >> 31).all()


def test_every_bfloat16_gradient_is_read_exactly(step: Step) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    grad = bits.view(torch.bfloat16)
    param, exp_avg, exp_avg_sq = torch.zeros(3, 2**16).unbind()
    shard = AdamShard(
        param=param, grads=[(0, grad)], exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, segments=still(2**16)
    )
    step([shard])
    torch.testing.assert_close(exp_avg, grad.float(), rtol=0, atol=0, equal_nan=True)
