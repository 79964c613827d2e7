"""The sum of squares: against float64, and the same bits for every number of threads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dslaunch.kernels import squared_norm

# Squares of float32 are exact in float64; only the additions round, at most one per element on the way of any
# element to the sum: 512 inside a lane, 31 lanes, and the blocks. Far fewer in practice.
RELATIVE_TOLERANCE = 600 * 2.0**-53

LENGTHS = sorted({0, 1} | {2**k + d for k in range(1, 18) for d in (-1, 0, 1)})
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def exact(grad: torch.Tensor) -> float:
    return math.fsum((grad.double() ** 2).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_the_exact_one_up_to_float64_rounding(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for numel in LENGTHS:
        grad = torch.randn(numel, generator=generator).to(dtype)
        assert squared_norm([grad]) == pytest.approx(exact(grad), rel=RELATIVE_TOLERANCE, abs=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_counts_once_wherever_it_is(dtype: torch.dtype) -> None:
    for numel in (1, 31, 32, 33, 95, 16383, 16384, 16385):
        for at in {0, numel // 2, numel - 1}:
            grad = torch.zeros(numel, dtype=dtype)
            grad[at] = 3.0
            assert squared_norm([grad]) == 9.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1000, 16384, 300_003])
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, numel: int) -> None:
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    assert len({squared_norm([grad], num_threads) for num_threads in (0, 1, 2, 3, 8)}) == 1


@pytest.mark.parametrize("start", range(1, 18))
def test_an_unaligned_start_changes_nothing(start: int) -> None:
    grad = torch.randn(1017 + start, generator=torch.Generator().manual_seed(start))
    assert squared_norm([grad[start:]]) == squared_norm([grad[start:].clone()])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_several_arrays_have_the_sum_of_their_sums(num_threads: int) -> None:
    generator = torch.Generator().manual_seed(7)
    sizes = (3, 0, 40_000, 16_384, 1, 300_003)
    grads = [
        torch.randn(numel, generator=generator).to(DTYPES[place % 3]) for place, numel in enumerate(sizes)
    ]
    one_by_one = 0.0
    for grad in grads:
        one_by_one += squared_norm([grad])
    assert squared_norm(iter(grads), num_threads) == one_by_one
    assert squared_norm([]) == 0.0


def test_large_values_do_not_overflow() -> None:
    largest = torch.finfo(torch.float32).max
    assert squared_norm([torch.full((2,), largest)]) == 2 * largest**2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [0, 50, 20_000])
def test_infinity_and_nan_come_through(dtype: torch.dtype, at: int) -> None:
    grad = torch.ones(20_001, dtype=dtype)
    grad[at] = -math.inf
    assert squared_norm([grad]) == math.inf
    grad[at] = math.nan
    assert math.isnan(squared_norm([grad]))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=70))
def test_any_values_give_their_sum_of_squares(values: list[float]) -> None:
    want = math.fsum(value * value for value in values)
    assert squared_norm([np.array(values, np.float32)]) == pytest.approx(want, rel=RELATIVE_TOLERANCE, abs=0)


def test_a_read_only_array_is_welcome() -> None:
    grad = np.full(3, 2.0, np.float32)
    grad.setflags(write=False)
    assert squared_norm([grad]) == 12.0


@pytest.mark.parametrize(
    ("grad", "error", "message"),
    [
        (torch.zeros(3).int(), TypeError, "grads[0]: dtype int32; must be float32, bfloat16 or float16"),
        (np.zeros(3), TypeError, "grads[0]: dtype float64; must be float32, bfloat16 or float16"),
        (torch.zeros(2, 2), ValueError, "grads[0]: 2 dimensions; must have 1: pass a flat view"),
        (torch.zeros(4)[::2], ValueError, "grads[0]: stride 2; must be 1: pass a contiguous array"),
    ],
)
def test_a_bad_gradient_is_refused(grad: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        squared_norm([grad])  # type: ignore[arg-type]
    assert str(caught.value) == message
