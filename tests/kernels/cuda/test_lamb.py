"""What only LAMB promises on a device: its sums, and in which order they are added.

Its source runs on the host.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dslaunch.kernels import lamb_step
from dslaunch.kernels.cuda import lamb
from dslaunch.kernels.cuda.arrays import CPU
from dslaunch.kernels.cuda.shards import read_shards
from dslaunch.kernels.cuda.table import SMALL
from tests.kernels.cuda.host_device import HostDevice
from tests.kernels.cuda.rules import Scratch, rule_of, run_on_host
from tests.kernels.optimizers import LAMB, Arrays, assert_same_bits, make_arrays

pytestmark = pytest.mark.slow  # g++ compiles a program in half a second

LAMB_, _ = LAMB
BF16 = torch.bfloat16
MANY_CHUNKS = 35 * 8192 + 77  # more than there are lanes


def by_cpu(arrays: list[Arrays], groups: list[Any]) -> list[tuple[float, float]]:
    return list(lamb_step(one.under(group) for one, group in zip(arrays, groups, strict=True)))


@pytest.mark.parametrize("num_blocks", [1, 3, 7])
def test_the_sums_have_the_bits_of_the_cpus_for_every_number_of_blocks(
    host: HostDevice, monkeypatch: pytest.MonkeyPatch, num_blocks: int
) -> None:
    monkeypatch.setattr(host, "num_blocks", num_blocks)
    arrays = make_arrays(LAMB_, MANY_CHUNKS, grad=BF16, out=BF16)
    cpus, scratch = arrays.clone(), Scratch()
    run_on_host(host, LAMB_, [arrays.under(LAMB_.whole(MANY_CHUNKS))], allocate=scratch)
    assert scratch.sums(1) == by_cpu([cpus], [LAMB_.whole(MANY_CHUNKS)])
    assert_same_bits(arrays, cpus)


@pytest.mark.parametrize("start", [1, 3, 8])
def test_the_address_changes_no_bit(host: HostDevice, start: int) -> None:
    big = make_arrays(LAMB_, start + 9000, grad=BF16, out=BF16)
    part, cpus, scratch = big[start:], big[start:].clone(), Scratch()
    run_on_host(host, LAMB_, [part.under(LAMB_.whole(9000))], allocate=scratch)
    assert scratch.sums(1) == by_cpu([cpus], [LAMB_.whole(9000)])
    assert_same_bits(part, cpus)


def test_three_hundred_parameters_of_three_dtypes_each_have_their_norms(
    host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several launches of every pass: chunks and segments are counted through all of them."""
    monkeypatch.setattr(host, "table_sizes", (SMALL,))
    kinds = (torch.float32, BF16, torch.float16)
    ours = [
        make_arrays(LAMB_, i * 37 % 500 if i % 50 else 9000, grad=kinds[i % 3], out=BF16, seed=i)
        for i in range(300)
    ]
    groups = [LAMB_.whole(one["param"].numel(), lr=0.01 * (i % 5)) for i, one in enumerate(ours)]
    cpus, scratch = [one.clone() for one in ours], Scratch()
    host.launches.clear()
    shards = (one.under(group) for one, group in zip(ours, groups, strict=True))
    run_on_host(host, LAMB_, shards, allocate=scratch)
    names = [name for name, _ in host.launches]
    assert names == ["lamb_directions"] * 6 + ["lamb_step_sizes"] * 3 + ["lamb_apply"] * 5
    assert scratch.sums(300) == by_cpu(cpus, groups)
    for one, other in zip(ours, cpus, strict=True):
        assert_same_bits(one, other)


def test_segments_of_a_flat_shard_have_their_own_norms_and_gaps_stay(host: HostDevice) -> None:
    ours = make_arrays(LAMB_, 50_000, grad=BF16, out=BF16)
    cpus, scratch = ours.clone(), Scratch()
    segments = (
        replace(LAMB_.segment, offset=20_000, numel=29_993, **LAMB_.another),
        replace(LAMB_.segment, offset=3, numel=17_000, weight_decay=0.0),
        replace(LAMB_.segment, offset=18_000, numel=0),
        replace(LAMB_.segment, offset=17_003, numel=1, lr=0.5),
    )
    run_on_host(host, LAMB_, [ours.under(segments)], allocate=scratch)
    assert scratch.sums(4) == by_cpu([cpus], [segments])
    assert scratch.sums(4)[2] == (0.0, 0.0)
    assert_same_bits(ours, cpus)


@pytest.mark.parametrize("zero", ["param", "grad"])
def test_where_a_norm_is_zero_the_quotient_is_one(host: HostDevice, zero: str) -> None:
    ours = make_arrays(LAMB_, 100)
    for name in (zero, "exp_avg") if zero == "grad" else (zero,):
        ours[name].zero_()
    cpus, group = ours.clone(), LAMB_.whole(100, weight_decay=0.0)
    run_on_host(host, LAMB_, [ours.under(group)])
    by_cpu([cpus], [group])
    assert_same_bits(ours, cpus)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_no_number_shows_where_it_does_on_the_cpu(host: HostDevice, bad: float) -> None:
    ours = make_arrays(LAMB_, 100)
    ours["grad"][7] = bad
    cpus = ours.clone()
    run_on_host(host, LAMB_, [ours.under(LAMB_.whole(100))])
    by_cpu([cpus], [LAMB_.whole(100)])
    assert torch.equal(ours["param"].isnan(), cpus["param"].isnan())
    assert ours["param"].isnan().any()


def test_a_factor_that_is_no_number_leaves_everything_as_it_is(host: HostDevice) -> None:
    arrays = make_arrays(LAMB_, 3000, grad=BF16, out=BF16)
    untouched = arrays.clone()
    run_on_host(host, LAMB_, [arrays.under(LAMB_.whole(3000))], device_scale=torch.tensor([math.nan]))
    assert_same_bits(arrays, untouched)


def test_a_factor_on_the_device_multiplies_the_gradient_too(host: HostDevice) -> None:
    ours = make_arrays(LAMB_, 3000, grad=BF16, out=BF16)
    cpus = ours.clone()
    shards = [ours.under(LAMB_.whole(3000))]
    run_on_host(host, LAMB_, shards, grad_scale=0.5, device_scale=torch.tensor([0.25]))
    lamb_step([cpus.under(LAMB_.whole(3000))], grad_scale=0.125)
    assert_same_bits(ours, cpus)


# ---- what is refused -------------------------------------------------------------------------------------


def test_a_gradient_in_several_pieces_is_refused(host: HostDevice) -> None:
    arrays = make_arrays(LAMB_, 100)
    untouched = arrays.clone()
    pieces = [(0, arrays["grad"][:40]), (40, arrays["grad"][40:])]
    message = (
        "shards[0].segments[0]: several pieces of the gradient; on a device LAMB takes the gradient of a "
        "segment in one piece: join them"
    )
    with pytest.raises(ValueError, match="pieces") as caught:
        run_on_host(host, LAMB_, [replace(arrays.under(LAMB_.whole(100)), grads=pieces)])
    assert str(caught.value) == message
    assert_same_bits(arrays, untouched)


@pytest.mark.parametrize(
    ("scratch", "error", "message"),
    [
        (torch.zeros(3, dtype=torch.float64), ValueError,
         "allocate(): 3 elements; must be the 5 that it was asked for"),
        (torch.zeros(5), TypeError, "allocate(): dtype float32; must be float64"),
    ],
)  # fmt: skip
def test_bad_scratch_is_refused(
    host: HostDevice, scratch: torch.Tensor, error: type[Exception], message: str
) -> None:
    arrays = make_arrays(LAMB_, 100)
    untouched = arrays.clone()
    with pytest.raises(error) as caught:
        run_on_host(host, LAMB_, [arrays.under(LAMB_.whole(100))], allocate=lambda numel: scratch)
    assert str(caught.value) == message
    assert_same_bits(arrays, untouched)


def test_limits_the_wrong_way_round_are_refused_in_the_words_of_the_cpu(host: HostDevice) -> None:
    shard = make_arrays(LAMB_, 8).under(LAMB_.whole(8, min_coeff=2.0, max_coeff=1.5))
    said = []
    for call in (lambda: run_on_host(host, LAMB_, [shard]), lambda: LAMB_.run([shard])):
        with pytest.raises(ValueError, match="min_coeff") as caught:
            call()
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_nothing_to_do_launches_nothing(host: HostDevice) -> None:
    host.launches.clear()
    arrays = make_arrays(LAMB_, 10)
    run_on_host(host, LAMB_, [arrays.under(())])
    run_on_host(host, LAMB_, [])
    assert host.launches == []


def test_the_table_of_segments_fits_in_a_kernels_parameters() -> None:
    segments = read_shards(
        [make_arrays(LAMB_, 8).under(LAMB_.whole(8))], rule_of(LAMB_), device_types=(CPU,)
    ).segments
    tables = lamb.segment_tables(segments * 121, [], bias_correction=True)
    assert [count for _, count in tables] == [120, 1]
    for (
        table,
        _,
    ) in tables:  # and three pointers; CUDA C++ Programming Guide, "__global__ Function Parameters"
        assert len(table) + 3 * 8 <= 4096
