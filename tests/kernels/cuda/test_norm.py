"""The sum of squares with the CUDA kernel's own source, run on the host."""

from __future__ import annotations

import math
import mmap

import pytest
import torch

from dslaunch.kernels.cuda import NORM_OUT_NUMEL, norm
from dslaunch.kernels.cuda.arrays import CPU
from tests.kernels.cuda.host_device import HostDevice

pytestmark = pytest.mark.slow  # g++ compiles a program in half a second

# Squares of float32 are exact in float64; only additions round: 32 in a thread per chunk,
# 8 in a block, few behind.
RELATIVE_TOLERANCE = 100 * 2.0**-53
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 7, 8, 9, 2047, 2048, 2049, 8191, 8192, 8193, 40_001)


def square(host: HostDevice, grads: list[torch.Tensor]) -> float:
    out = torch.full((NORM_OUT_NUMEL,), math.nan, dtype=torch.float64)  # scratch need not be clean
    norm.squared_norm(grads, out=out, stream=0, device=host, device_types=(CPU,))
    return float(out[0])


def exact(grad: torch.Tensor) -> float:
    return math.fsum((grad.double() ** 2).tolist())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_the_exact_one_up_to_float64_rounding(host: HostDevice, dtype: torch.dtype) -> None:
    for numel in LENGTHS:
        grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
        assert square(host, [grad]) == pytest.approx(exact(grad), rel=RELATIVE_TOLERANCE, abs=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_counts_once_wherever_it_is(host: HostDevice, dtype: torch.dtype) -> None:
    for numel in (1, 8, 9, 8192, 8200):
        for at in {0, numel // 2, numel - 1}:
            grad = torch.zeros(numel, dtype=dtype)
            grad[at] = 3.0
            assert square(host, [grad]) == 9.0


@pytest.mark.parametrize("start", range(1, 10))
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_address_changes_no_bit(host: HostDevice, dtype: torch.dtype, start: int) -> None:
    grad = torch.randn(9000 + start, generator=torch.Generator().manual_seed(start)).to(dtype)
    assert square(host, [grad[start:]]) == square(host, [grad[start:].clone()])


@pytest.mark.exhaustive
def test_elements_beyond_2_to_the_31_count(host: HostDevice) -> None:
    """Of memory of which all but a few pages are the system's page of zeros."""
    numel = 2**31 + 3 * 8192 + 5
    pages = mmap.mmap(-1, 2 * numel, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    grad = torch.frombuffer(pages, dtype=torch.bfloat16)
    for at, value in ((0, 3), (2**31 - 1, 4), (2**31, 5), (2**31 + 1, 2), (numel - 1, 6)):
        grad[at] = value
    assert square(host, [grad]) == 9 + 16 + 25 + 4 + 36


def test_many_arrays_of_all_dtypes_are_added_up(host: HostDevice) -> None:
    grads = [
        torch.randn(i * 13 % 300, generator=torch.Generator().manual_seed(i)).to(DTYPES[i % 3])
        for i in range(200)
    ]
    host.launches.clear()
    want = math.fsum(exact(grad) for grad in grads)
    assert square(host, grads) == pytest.approx(want, rel=RELATIVE_TOLERANCE, abs=0)
    assert [kernel for kernel, _ in host.launches] == ["norm_begin", *["norm_add"] * 6, "norm_end"]
    assert square(host, []) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [0, 50, 20_000])
def test_infinity_and_nan_come_through(host: HostDevice, dtype: torch.dtype, at: int) -> None:
    grad = torch.ones(20_001, dtype=dtype)
    grad[at] = -math.inf
    assert square(host, [grad]) == math.inf
    grad[at] = math.nan
    assert math.isnan(square(host, [grad]))


def test_large_values_do_not_overflow(host: HostDevice) -> None:
    largest = torch.finfo(torch.float32).max
    assert square(host, [torch.full((2,), largest)]) == 2 * largest**2


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (torch.zeros(NORM_OUT_NUMEL), TypeError, "out: dtype float32; must be float64"),
        (
            torch.zeros(1, dtype=torch.float64),
            ValueError,
            f"out: 1 elements; must be {NORM_OUT_NUMEL}, of which the first is the result",
        ),
    ],
)
def test_a_bad_place_for_the_result_is_refused(
    host: HostDevice, out: torch.Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        norm.squared_norm([], out=out, stream=0, device=host, device_types=(CPU,))
    assert str(caught.value) == message
