"""The conversions from and to bfloat16 and float16 inside a step, seen through steps that
change nothing else.

With lr 0 the parameter stays as it is, so `param_out` is its rounded copy; with both betas 0 `exp_avg`
becomes the gradient, so a 16-bit gradient is seen as float32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dslaunch.kernels import AdamSegment, AdamShard, adamw_step, adamw_step_reference

Step = Callable[..., None]

HALVES = [torch.bfloat16, torch.float16]
EXPONENT = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # all ones: infinity, NaN


@pytest.fixture(params=[adamw_step, adamw_step_reference], ids=["fast", "plain"])
def step(request: pytest.FixtureRequest) -> Step:
    chosen: Step = request.param
    return chosen


def still(numel: int) -> tuple[AdamSegment, ...]:
    return (
        AdamSegment(offset=0, numel=numel, lr=0.0, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0, step=1),
    )


def rounded(step: Step, values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return the bits of `param_out` for parameters with these values."""
    param = torch.from_numpy(values.astype(np.float32, copy=True))
    grad, exp_avg, exp_avg_sq = torch.zeros(3, len(values)).unbind()
    out = torch.zeros(len(values), dtype=dtype)
    step(
        [
            AdamShard(
                param=param,
                grads=[(0, grad)],
                exp_avg=exp_avg,
                exp_avg_sq=exp_avg_sq,
                segments=still(len(values)),
                param_out=out,
            )
        ]
    )
    return out.view(torch.int16).numpy().view(np.uint16).astype(np.int64)


def of_bits(bits: list[int]) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("sign", [0, 0x8000])
def test_between_two_neighbours_the_nearer_one_is_taken_and_halfway_the_even_one(
    step: Step, dtype: torch.dtype, sign: int
) -> None:
    """All finite pairs, the subnormal ones and the last before infinity included."""
    bits = np.arange(EXPONENT[dtype], dtype=np.int64)
    lower = torch.from_numpy((bits | sign).astype(np.uint16).view(np.int16)).view(dtype).double().numpy()
    upper = np.append(lower[1:], 2 * lower[-1] - lower[-2])  # where infinity would be if it were a number
    middle = ((lower + upper) / 2).astype(np.float32)
    assert np.array_equal(middle.astype(np.float64), (lower + upper) / 2)
    away, to = np.float32(np.inf if sign == 0 else -np.inf), np.float32(0)
    for values, goes_up in (
        (lower, 0),
        (np.nextafter(lower.astype(np.float32), away), 0),
        (np.nextafter(middle, to), 0),
        (middle, bits % 2),
        (np.nextafter(middle, away), 1),
    ):
        assert np.array_equal(rounded(step, values, dtype), (bits + goes_up) | sign)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_what_is_too_large_becomes_infinity_and_what_is_too_small_a_zero_of_its_sign(
    step: Step, dtype: torch.dtype
) -> None:
    largest, tiny = np.finfo(np.float32).max, np.float32(2.0**-149)
    infinity = EXPONENT[dtype]
    assert rounded(step, np.array([np.inf, largest]), dtype).tolist() == [infinity] * 2
    assert rounded(step, np.array([-np.inf, -largest]), dtype).tolist() == [infinity | 0x8000] * 2
    assert rounded(step, np.array([0.0, -0.0, tiny, -tiny]), dtype).tolist() == [0, 0x8000, 0, 0x8000]
    if dtype == torch.float16:
        values = np.array([65519.99609375, 65520.0, 2.0**-25, 2.0**-25 * (1 + 2.0**-23)])
        assert rounded(step, values, dtype).tolist() == [0x7BFF, 0x7C00, 0, 1]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_nan_stays_a_nan_of_the_same_sign(step: Step, dtype: torch.dtype) -> None:
    # Payloads whose bits lie in the lower half only, and those that rounding would carry into the sign.
    nans = [0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0x7FFF8000, 0xFF800001, 0xFFFFFFFF, 0xFF808000]
    got = rounded(step, of_bits(nans), dtype)
    exponent = EXPONENT[dtype]
    assert ((got & exponent) == exponent).all()
    assert ((got & (0x7FFF - exponent)) != 0).all()
    assert (got >> 15 == np.array(nans) >> 31).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("flush", [False, True])
def test_every_16_bit_gradient_is_read_exactly(step: Step, dtype: torch.dtype, flush: bool) -> None:
    """With the processor set to flush subnormal float32 to zero, too: float16's are normal there."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    grad = bits.view(dtype)
    if flush and dtype == torch.bfloat16:
        grad = grad[
            (grad.float().abs() >= 2.0**-126) | ~grad.isfinite() | (grad == 0)
        ]  # those are float32's own
    want = grad.float()
    param, exp_avg, exp_avg_sq = torch.zeros(3, grad.numel()).unbind()
    shard = AdamShard(
        param=param, grads=[(0, grad)], exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, segments=still(grad.numel())
    )
    if flush and not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        step([shard])
    finally:
        torch.set_flush_denormal(False)
    torch.testing.assert_close(exp_avg, want, rtol=0, atol=0, equal_nan=True)
