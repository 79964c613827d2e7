"""A step with the CUDA kernels' own source, run on the host: each element has the bits of the CPU's kernel.

What runs here is everything but the driver: the checks, the plan, the table's bytes,
and every line of the `.cu` files.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dslaunch.kernels.cuda import CudaUnavailable, steps
from dslaunch.kernels.cuda.arrays import CPU
from dslaunch.kernels.cuda.compiler import Program
from dslaunch.kernels.cuda.table import SMALL
from tests.exhaustive import few
from tests.kernels.cuda.host_device import HostDevice
from tests.kernels.cuda.rules import ELEMENTWISE, rule_of, run_on_host
from tests.kernels.optimizers import (
    ADAM,
    OPTIMIZERS,
    SGD,
    Optimizer,
    assert_follows_formula,
    assert_same_bits,
    make_arrays,
)

pytestmark = pytest.mark.slow  # g++ compiles a program in half a second

# A thread takes 8 elements, a block 2048 at a time, a chunk is 8192, and the host has 3 blocks.
LENGTHS = (0, 1, 7, 8, 9, 2047, 2048, 2049, 8191, 8192, 8193, 4 * 8192 + 5)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [(FP32, FP32, None), (BF16, FP32, BF16), (FP16, BF16, FP16)]
MORE_DTYPES = [(BF16, BF16, FP32), (FP16, FP32, FP32), (FP32, BF16, BF16)]
CASES = [
    (optimizer, *dtypes)
    for optimizer in OPTIMIZERS
    for dtypes in (DTYPES + MORE_DTYPES if optimizer is ADAM[0] else DTYPES[1:])
]
ADAMW = ADAM[0]

every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)


@pytest.mark.parametrize(
    ("optimizer", "grad", "state", "out"),
    few(
        CASES,
        lambda optimizer, *dtypes: dtypes[0] == BF16 if optimizer is not ADAMW else dtypes in DTYPES[:2],
    ),
    ids=str,
)
def test_every_element_follows_the_formula_and_has_the_bits_of_the_cpus_kernel(
    host: HostDevice, optimizer: Optimizer, grad: torch.dtype, state: torch.dtype, out: torch.dtype | None
) -> None:
    for numel in LENGTHS:
        before = make_arrays(optimizer, numel, grad=grad, state=state, out=out, seed=numel)
        ours, cpus = before.clone(), before.clone()
        segments = optimizer.whole(numel)
        run_on_host(host, optimizer, [ours.under(segments)], grad_scale=1 / 3)
        optimizer.run([cpus.under(segments)], fast=False, grad_scale=1 / 3)
        assert_follows_formula(before, ours, segments[0], grad_scale=1 / 3)
        assert_same_bits(ours, cpus)


@pytest.mark.parametrize("start", range(1, 18))
def test_an_unaligned_start_changes_nothing(host: HostDevice, start: int) -> None:
    numel = 2100
    big = make_arrays(ADAMW, start + numel + 3, grad=BF16, out=BF16)
    untouched = big.clone()
    part = big[start : start + numel]
    aligned = part.clone()
    run_on_host(host, ADAMW, [part.under(ADAMW.whole(numel))])
    run_on_host(host, ADAMW, [aligned.under(ADAMW.whole(numel))])
    assert_same_bits(part, aligned)
    assert_same_bits(big[:start], untouched[:start])
    assert_same_bits(big[start + numel :], untouched[start + numel :])


@pytest.mark.parametrize("shift", [1, 4])
def test_arrays_that_are_never_aligned_together_are_updated_too(host: HostDevice, shift: int) -> None:
    arrays = make_arrays(ADAMW, 20_000)
    same = arrays.clone()
    moved = torch.empty(20_000 + shift)[shift:].copy_(arrays["grad"])
    shard = replace(arrays.under(ADAMW.whole(20_000)), grads=[(0, moved)])
    run_on_host(host, ADAMW, [shard])
    ADAMW.run([same.under(ADAMW.whole(20_000))])
    assert_same_bits(arrays, same)


@every_optimizer
@pytest.mark.parametrize("step", [1, 10**6])
def test_the_first_step_and_the_millionth_have_the_bits_of_the_cpus(
    host: HostDevice, optimizer: Optimizer, step: int
) -> None:
    ours = make_arrays(optimizer, 257, grad=BF16, out=BF16)
    cpus = ours.clone()
    hyper = {"step": step} if hasattr(optimizer.segment, "step") else {}
    run_on_host(host, optimizer, [ours.under(optimizer.whole(257, **hyper))])
    optimizer.run([cpus.under(optimizer.whole(257, **hyper))])
    assert_same_bits(ours, cpus)


# ---- segments, pieces, many shards -------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=str)
def test_segments_and_pieces_have_the_bits_of_the_cpus_and_gaps_stay(
    host: HostDevice, optimizer: Optimizer
) -> None:
    ours = make_arrays(optimizer, 50_000, grad=BF16, out=BF16)
    cpus = ours.clone()
    segments = (
        replace(optimizer.segment, offset=20_000, numel=29_993, **optimizer.another),
        replace(optimizer.segment, offset=3, numel=17_000, weight_decay=0.0),
        replace(optimizer.segment, offset=18_000, numel=0),
        replace(optimizer.segment, offset=17_003, numel=1, lr=0.5),
    )
    grad = ours["grad"]
    pieces = [(0, grad[:7]), (7, grad[7:20_000].half()), (20_005, grad[20_005:49_000]), (49_000, grad[:0])]
    run_on_host(host, optimizer, [replace(ours.under(segments), grads=iter(pieces))])
    optimizer.run([replace(cpus.under(segments), grads=pieces)])
    assert_same_bits(ours, cpus)


def test_three_hundred_parameters_are_one_launch(host: HostDevice) -> None:
    sizes = [(i * 37) % 500 + 1 for i in range(300)]
    ours = [make_arrays(ADAMW, numel, grad=BF16, out=BF16, seed=i) for i, numel in enumerate(sizes)]
    cpus = [arrays.clone() for arrays in ours]
    groups = [ADAMW.whole(numel, lr=0.01 * (i % 20)) for i, numel in enumerate(sizes)]
    host.launches.clear()
    run_on_host(host, ADAMW, [one.under(group) for one, group in zip(ours, groups, strict=True)])
    assert host.launches == [("optimizer_step", host.num_blocks)]
    ADAMW.run([one.under(group) for one, group in zip(cpus, groups, strict=True)])
    for one, other in zip(ours, cpus, strict=True):
        assert_same_bits(one, other)


def test_small_tables_take_more_launches_and_give_the_same(
    host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "table_sizes", (SMALL,))
    numels = [5 + i for i in range(130)]
    ours = [make_arrays(ADAMW, numel, grad=BF16, out=BF16, seed=numel) for numel in numels]
    cpus = [arrays.clone() for arrays in ours]
    host.launches.clear()
    run_on_host(host, ADAMW, [one.under(ADAMW.whole(one["param"].numel())) for one in ours])
    assert len(host.launches) == 3
    ADAMW.run([one.under(ADAMW.whole(one["param"].numel())) for one in cpus])
    for one, other in zip(ours, cpus, strict=True):
        assert_same_bits(one, other)


def test_shards_of_several_dtypes_are_a_launch_each(host: HostDevice) -> None:
    kinds = [(100, FP32, None), (9000, BF16, BF16), (5, FP32, None), (33, BF16, BF16)]
    ours = [make_arrays(ADAMW, numel, grad=grad, out=out) for numel, grad, out in kinds]
    cpus = [arrays.clone() for arrays in ours]
    host.launches.clear()
    run_on_host(host, ADAMW, (one.under(ADAMW.whole(one["param"].numel())) for one in ours))
    assert len(host.launches) == 2
    ADAMW.run([one.under(ADAMW.whole(one["param"].numel())) for one in cpus])
    for one, other in zip(ours, cpus, strict=True):
        assert_same_bits(one, other)


def test_sgd_without_momentum_needs_no_buffer(host: HostDevice) -> None:
    optimizer = SGD[1]
    assert optimizer.name == "SGD without momentum"
    ours = make_arrays(optimizer, 1000, grad=BF16, out=BF16)
    cpus = ours.clone()
    segments = optimizer.whole(1000)
    run_on_host(host, optimizer, [replace(ours.under(segments), momentum_buffer=None)])
    optimizer.run([cpus.under(segments)])
    assert_same_bits(ours, cpus)


def test_nothing_to_do_launches_nothing(host: HostDevice) -> None:
    host.launches.clear()
    arrays = make_arrays(ADAMW, 10, out=BF16)
    run_on_host(host, ADAMW, [arrays.under(())])
    run_on_host(host, ADAMW, [])
    assert host.launches == []
    assert_same_bits(arrays, make_arrays(ADAMW, 10, out=BF16))


# ---- a factor on the device ------------------------------------------------------------------------------


def test_a_factor_on_the_device_multiplies_the_gradient_too(host: HostDevice) -> None:
    ours = make_arrays(ADAMW, 3000, grad=BF16, out=BF16)
    cpus = ours.clone()
    segments = ADAMW.whole(3000)
    run_on_host(host, ADAMW, [ours.under(segments)], grad_scale=0.5, device_scale=torch.tensor([0.25]))
    ADAMW.run([cpus.under(segments)], grad_scale=0.125)
    assert_same_bits(ours, cpus)


@pytest.mark.parametrize("factor", [math.inf, -math.inf, math.nan])
def test_a_factor_that_is_no_number_leaves_everything_as_it_is(host: HostDevice, factor: float) -> None:
    arrays = make_arrays(ADAMW, 3000, grad=BF16, out=BF16)
    untouched = arrays.clone()
    run_on_host(host, ADAMW, [arrays.under(ADAMW.whole(3000))], device_scale=torch.tensor([factor]))
    assert_same_bits(arrays, untouched)


# ---- when a kernel cannot be had -------------------------------------------------------------------------


class NoHalf(HostDevice):
    """A device whose compiler fails for float16."""

    def prepare(self, program: Program, kernel: str) -> None:
        if ("DSLAUNCH_GRAD", "float16") in program.macros:
            raise CudaUnavailable("no float16 today")


def test_nothing_is_launched_before_every_kernel_is_there(tmp_path: Any) -> None:
    device = NoHalf(tmp_path)
    arrays = [make_arrays(ADAMW, 10, grad=grad) for grad in (FP32, FP16)]
    with pytest.raises(CudaUnavailable, match="no float16 today"):
        steps.step(
            [one.under(ADAMW.whole(10)) for one in arrays],
            rule_of(ADAMW),
            device_scale=None,
            stream=0,
            device=device,
            device_types=(CPU,),
        )
    assert device.launches == []
