"""On a real device: the public calls, against the formula in float64 and the bits of the CPU's kernels."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dslaunch.kernels import lamb_step
from dslaunch.kernels.cuda import NORM_OUT_NUMEL, squared_norm, step
from tests.kernels.cuda.rules import ELEMENTWISE, Scratch, run_on_device
from tests.kernels.optimizers import (
    ADAM,
    LAMB,
    OPTIMIZERS,
    Arrays,
    Optimizer,
    assert_follows_formula,
    assert_same_bits,
    make_arrays,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device"),
]

# Rounding to 16 bits, division and roots are IEEE's on both sides and nothing is fused: no tolerance at all.
LENGTHS = sorted({0, 1, 2**21 + 5} | {2**k + d for k in range(1, 17) for d in (-1, 0, 1)})
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [
    (FP32, FP32, None),
    (BF16, FP32, BF16),
    (FP16, FP32, FP16),
    (FP16, BF16, FP16),
    (BF16, BF16, FP32),
]
ADAMW = ADAM[0]
# As in test_grad_norm.py of this folder.
NORM_TOLERANCE = 100 * 2.0**-53

every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)


def moved(arrays: Arrays, device: str) -> Arrays:
    return Arrays(
        arrays.optimizer, {name: tensor.to(device, copy=True) for name, tensor in arrays.tensors.items()}
    )


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


@every_optimizer
@pytest.mark.parametrize(("grad", "state", "out"), DTYPES, ids=str)
def test_every_element_follows_the_formula_and_has_the_bits_of_the_cpus_kernel(
    optimizer: Optimizer, grad: torch.dtype, state: torch.dtype, out: torch.dtype | None
) -> None:
    for numel in LENGTHS:
        before = make_arrays(optimizer, numel, grad=grad, state=state, out=out, seed=numel)
        on_device, cpus = moved(before, "cuda"), before.clone()
        segments = optimizer.whole(numel)
        run_on_device(optimizer, [on_device.under(segments)], grad_scale=1 / 3, stream=stream())
        optimizer.run([cpus.under(segments)], grad_scale=1 / 3)
        after = moved(on_device, "cpu")
        assert_follows_formula(before, after, segments[0], grad_scale=1 / 3)
        assert_same_bits(after, cpus)


@every_optimizer
@pytest.mark.parametrize("start", range(1, 18))
def test_an_unaligned_start_changes_nothing(optimizer: Optimizer, start: int) -> None:
    numel = 5000
    before = make_arrays(optimizer, start + numel + 3, grad=BF16, out=BF16)
    big = moved(before, "cuda")
    run_on_device(optimizer, [big[start : start + numel].under(optimizer.whole(numel))], stream=stream())
    cpus = before.clone()
    optimizer.run([cpus[start : start + numel].under(optimizer.whole(numel))])
    assert_same_bits(moved(big, "cpu"), cpus)


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=str)
def test_segments_and_pieces_have_the_bits_of_the_cpus_and_gaps_stay(optimizer: Optimizer) -> None:
    before = make_arrays(optimizer, 50_000, grad=BF16, out=BF16)
    segments = (
        replace(optimizer.segment, offset=20_000, numel=29_993, **optimizer.another),
        replace(optimizer.segment, offset=3, numel=17_000, weight_decay=0.0),
        replace(optimizer.segment, offset=18_000, numel=0),
        replace(optimizer.segment, offset=17_003, numel=1, lr=0.5),
    )

    def in_pieces(arrays: Arrays) -> Any:
        grad = arrays["grad"]
        pieces = [
            (0, grad[:7]),
            (7, grad[7:20_000].half()),
            (20_005, grad[20_005:49_000]),
            (49_000, grad[:0]),
        ]
        return replace(arrays.under(segments), grads=pieces)

    on_device, cpus = moved(before, "cuda"), before.clone()
    run_on_device(optimizer, [in_pieces(on_device)], stream=stream())
    optimizer.run([in_pieces(cpus)])
    assert_same_bits(moved(on_device, "cpu"), cpus)


@pytest.mark.parametrize("num_params", [300, 1100])
def test_an_ordinary_list_of_parameters_has_the_bits_of_the_cpus(num_params: int) -> None:
    """300 fit in the large table, where the driver takes it; 1100 take several launches everywhere."""
    before = [make_arrays(ADAMW, i * 37 % 5000, grad=BF16, out=BF16, seed=i) for i in range(num_params)]
    groups = [ADAMW.whole(i * 37 % 5000, lr=0.001 * (i % 20)) for i in range(num_params)]
    on_device, cpus = [moved(one, "cuda") for one in before], [one.clone() for one in before]
    run_on_device(
        ADAMW, [one.under(group) for one, group in zip(on_device, groups, strict=True)], stream=stream()
    )
    ADAMW.run([one.under(group) for one, group in zip(cpus, groups, strict=True)])
    for one, other in zip(on_device, cpus, strict=True):
        assert_same_bits(moved(one, "cpu"), other)


def test_a_factor_on_the_device_multiplies_the_gradient_and_skips_what_is_no_number() -> None:
    before = make_arrays(ADAMW, 30_000, grad=BF16, out=BF16)
    segments = ADAMW.whole(30_000)
    for factor in (0.25, math.inf, math.nan):
        on_device, cpus = moved(before, "cuda"), before.clone()
        scale = torch.tensor([factor], device="cuda")
        run_on_device(ADAMW, [on_device.under(segments)], grad_scale=0.5, device_scale=scale, stream=stream())
        if math.isfinite(factor):
            ADAMW.run([cpus.under(segments)], grad_scale=0.5 * factor)
        assert_same_bits(moved(on_device, "cpu"), cpus)


def test_a_step_waits_for_what_its_stream_does_before() -> None:
    """The gradient is made on the same stream, by work that takes long enough to be overtaken."""
    side = torch.cuda.Stream()
    before = make_arrays(ADAMW, 2**20)
    on_device = moved(before, "cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # cycles: some tens of milliseconds
        on_device["grad"].mul_(2)
        run_on_device(ADAMW, [on_device.under(ADAMW.whole(2**20))], stream=side.cuda_stream)
    side.synchronize()
    before["grad"].mul_(2)
    ADAMW.run([before.under(ADAMW.whole(2**20))])
    assert_same_bits(moved(on_device, "cpu"), before)


def test_lambs_sums_have_the_bits_of_the_cpus_every_time() -> None:
    numel = 35 * 8192 + 77  # more chunks than lanes
    before = make_arrays(LAMB[0], numel, grad=BF16, out=BF16)
    cpus = before.clone()
    want = lamb_step([cpus.under(LAMB[0].whole(numel))])
    for _ in range(5):
        on_device, scratch = moved(before, "cuda"), Scratch("cuda")
        shards = [on_device.under(LAMB[0].whole(numel))]
        run_on_device(LAMB[0], shards, allocate=scratch, stream=stream())
        assert scratch.sums(1) == want
        assert_same_bits(moved(on_device, "cpu"), cpus)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_the_norm_is_exact_up_to_float64_rounding_and_the_address_changes_no_bit(dtype: torch.dtype) -> None:
    for numel in LENGTHS:
        grad = torch.randn(numel + 3, generator=torch.Generator().manual_seed(numel)).to(dtype)[3:]
        want = math.fsum((grad.double() ** 2).tolist())
        aligned, shifted = grad.cuda(), torch.empty(numel + 3, dtype=dtype, device="cuda")[3:].copy_(grad)
        squares = [square([aligned]), square([shifted]), square([aligned])]
        assert squares[0] == pytest.approx(want, rel=NORM_TOLERANCE, abs=0)
        assert squares == squares[:1] * 3


# ---- more elements than 32 bits count

MANY = 2**31 + 3 * 8192 + 5
PERIOD = 2**20 + 24  # elements, a whole number of 16-byte loads of every dtype


def need_memory(num_bytes: int) -> None:
    """Skip where the device has less."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < num_bytes:
        pytest.skip(
            f"needs {num_bytes / 2**30:.0f} GiB of free device memory; {free / 2**30:.0f} GiB are free"
        )


def is_repeated(big: torch.Tensor, small: torch.Tensor) -> bool:
    """Whether `big` is `small` over and over, to the bit, its last part cut off."""
    whole = big.numel() // small.numel() * small.numel()
    integers = torch.int16 if big.element_size() == 2 else torch.int32
    rows, row = big[:whole].view(integers).view(-1, small.numel()), small.view(integers)
    is_same = all(bool((part == row).all()) for part in rows.split(64))
    rest = big[whole:].view(integers)
    return is_same and torch.equal(rest, row[: rest.numel()])


def test_a_step_of_more_than_2_to_the_31_elements_has_the_bits_of_a_small_one() -> None:
    """Every element: the arrays repeat small ones."""
    small = moved(make_arrays(ADAMW, PERIOD, grad=BF16, state=BF16, out=FP32), "cuda")
    bytes_per_element = sum(tensor.element_size() for tensor in small.tensors.values())
    need_memory(MANY * bytes_per_element + 2**31)
    big = Arrays(ADAMW, {})
    for name, tensor in small.tensors.items():
        big.tensors[name] = torch.empty(MANY, dtype=tensor.dtype, device="cuda")
        for part in big.tensors[name].split(PERIOD):
            part.copy_(tensor[: part.numel()])
    run_on_device(ADAMW, [big.under(ADAMW.whole(MANY))], stream=stream())
    run_on_device(ADAMW, [small.under(ADAMW.whole(PERIOD))], stream=stream())
    for name, tensor in small.tensors.items():
        assert is_repeated(big[name], tensor), name


def test_the_norm_of_more_than_2_to_the_31_elements_counts_the_last_ones() -> None:
    need_memory(2 * MANY + 2**30)
    grad = torch.zeros(MANY, dtype=BF16, device="cuda")
    for at, value in ((0, 3), (1, 1), (2**31 - 1, 4), (2**31, 5), (2**31 + 1, 2), (MANY - 1, 6)):
        grad[at] = value
    assert square([grad]) == 9 + 1 + 16 + 25 + 4 + 36
    assert square([grad[1:]]) == 1 + 16 + 25 + 4 + 36  # not aligned
    assert square([grad[: 2**31], grad[2**31 :]]) == 9 + 1 + 16 + 25 + 4 + 36


# ---- CUDA graphs


def test_a_captured_graph_repeats_the_step_and_the_norm() -> None:
    before = make_arrays(ADAMW, 30_000, grad=BF16, out=BF16)
    segments, cpus = ADAMW.whole(30_000), before.clone()
    on_device, out = (
        moved(before, "cuda"),
        torch.zeros(NORM_OUT_NUMEL, dtype=torch.float64, device="cuda"),
    )
    run_on_device(ADAMW, [moved(before, "cuda").under(segments)], stream=stream())  # programs are loaded
    expected = square([on_device["grad"]])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        squared_norm([on_device["grad"]], out=out, stream=stream())
        run_on_device(ADAMW, [on_device.under(segments)], stream=stream())
    assert_same_bits(moved(on_device, "cpu"), before)  # what is captured does not run
    for _ in range(3):
        out.zero_()
        graph.replay()
        ADAMW.run([cpus.under(segments)])
        assert float(out[0]) == expected
        assert_same_bits(moved(on_device, "cpu"), cpus)


def test_infinity_and_nan_come_through_the_norm() -> None:
    grad = torch.ones(20_001, device="cuda")
    grad[77] = math.inf
    assert square([grad, torch.ones(5, device="cuda").half()]) == math.inf
    grad[77] = math.nan
    assert math.isnan(square([grad]))


def square(grads: list[torch.Tensor]) -> float:
    out = torch.full((NORM_OUT_NUMEL,), math.nan, dtype=torch.float64, device="cuda")
    squared_norm(grads, out=out, stream=stream())
    return float(out[0])


def test_what_is_not_on_a_device_is_refused() -> None:
    arrays = moved(make_arrays(ADAMW, 8), "cuda")
    shard = replace(arrays.under(ADAMW.whole(8)), grads=[(0, torch.zeros(8))])
    with pytest.raises(ValueError, match=r"^shards\[0\].grads\[0\]: the array is in host memory"):
        step(ADAM[0].kernel, [shard], stream=stream())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_arrays_on_another_device_than_the_current_one_are_refused() -> None:
    arrays = moved(make_arrays(ADAMW, 8), "cuda:1")
    with torch.cuda.device(0), pytest.raises(ValueError, match="on CUDA device 1, but device 0 is current"):
        step(ADAM[0].kernel, [arrays.under(ADAMW.whole(8))], stream=0)


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    script = (
        "import torch\n"
        "from dslaunch.kernels.cuda import NORM_OUT_NUMEL, compiler, squared_norm\n"
        "calls = []\n"
        "compile = compiler.Nvrtc.compile\n"
        "compiler.Nvrtc.compile = lambda *args: calls.append(args) or compile(*args)\n"
        "out = torch.empty(NORM_OUT_NUMEL, dtype=torch.float64, device='cuda')\n"
        "squared_norm([torch.full((3,), 2.0, device='cuda')], out=out, "
        "stream=torch.cuda.current_stream().cuda_stream)\n"
        "print(len(calls), float(out[0]))\n"
    )
    environment = {**os.environ, "DSLAUNCH_CACHE_DIR": str(tmp_path)}
    for num_compiled in (1, 0):
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{num_compiled} 12.0\n"
