"""What only LAMB promises: its norms and its two passes; the arithmetic of every optimizer
is in test_steps.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dslaunch.kernels import LambSums, lamb_apply, lamb_directions, lamb_step, lamb_step_reference
from tests.kernels.optimizers import LAMB, assert_same_bits, make_arrays

LAMB_, _ = LAMB
# Squares of float32 are exact in float64; only the additions round, at most one per element of a
# lane, lane and block.
RELATIVE_TOLERANCE = 600 * 2.0**-53
NUMELS = (1, 31, 32, 33, 1023, 1024, 1025, 8191, 8192, 8193, 300_001)


def exact(tensor: torch.Tensor) -> float:
    return math.fsum((tensor.double() ** 2).tolist())


@pytest.mark.parametrize("numel", NUMELS)
def test_the_sums_are_those_of_the_parameter_before_the_step_and_of_the_direction(numel: int) -> None:
    arrays = make_arrays(LAMB_, numel, grad=torch.bfloat16)
    before = arrays.clone()
    (sums,) = lamb_directions([arrays.under(LAMB_.whole(numel))])
    assert torch.equal(arrays["param"], before["param"])
    assert sums.param == pytest.approx(exact(before["param"]), rel=RELATIVE_TOLERANCE, abs=0)
    assert sums.update == pytest.approx(exact(arrays["update"]), rel=RELATIVE_TOLERANCE, abs=0)


def test_every_segment_of_every_shard_has_its_sums() -> None:
    shards = [make_arrays(LAMB_, numel, seed=numel) for numel in (40_000, 100)]
    usual = LAMB_.segment
    segments = [
        (
            replace(usual, offset=20_000, numel=20_000),
            replace(usual, numel=5),
            replace(usual, offset=9, numel=0),
        ),
        (replace(usual, offset=1, numel=99),),
    ]
    got = lamb_step(arrays.under(of_shard) for arrays, of_shard in zip(shards, segments, strict=True))
    alone = []
    for numel, of_shard in zip((40_000, 100), segments, strict=True):
        for segment in of_shard:
            part = make_arrays(LAMB_, numel, seed=numel)[segment.offset : segment.offset + segment.numel]
            alone += lamb_step([part.under((replace(segment, offset=0),))])
    assert got == alone
    assert got[2] == LambSums(0.0, 0.0)


@pytest.mark.parametrize("step", [lamb_step, lamb_step_reference])
def test_only_elements_with_a_gradient_count_and_move(step) -> None:  # type: ignore[no-untyped-def]
    arrays = make_arrays(LAMB_, 100, out=torch.bfloat16)
    before = arrays.clone()
    joined = make_arrays(LAMB_, 100, out=torch.bfloat16)[:70]  # the first 40 and the last 30 elements
    for name, tensor in joined.tensors.items():
        tensor.copy_(torch.cat([before[name][:40], before[name][70:]]))
    grad = arrays["grad"]
    pieces = [(0, grad[:40]), (70, grad[70:])]
    ((of_pieces, of_updates),) = step([replace(arrays.under(LAMB_.whole(100)), grads=pieces)])
    ((of_joined, of_joined_updates),) = step([joined.under(LAMB_.whole(70))])
    assert_same_bits(arrays[40:70], before[40:70])
    assert of_pieces == pytest.approx(of_joined, rel=RELATIVE_TOLERANCE, abs=0)
    assert of_updates == pytest.approx(of_joined_updates, rel=RELATIVE_TOLERANCE, abs=0)
    assert_same_bits(arrays[:40], joined[:40])
    assert_same_bits(arrays[70:], joined[40:])


def test_a_parameter_in_two_shards_moves_as_a_whole_with_the_sums_added_up() -> None:
    whole = make_arrays(LAMB_, 16_384)
    parts = [whole.clone()[:8192], whole.clone()[8192:]]
    lamb_step([whole.under(LAMB_.whole(16_384))])
    shards = [part.under(LAMB_.whole(8192)) for part in parts]
    first, second = lamb_directions(shards)
    total = LambSums(first.param + second.param, first.update + second.update)
    lamb_apply(shards, [total, total])
    assert_same_bits(whole[:8192], parts[0])  # halves of whole blocks: the sums have the same bits
    assert_same_bits(whole[8192:], parts[1])


@pytest.mark.parametrize("zero", ["param", "update"])
def test_where_a_norm_is_zero_the_quotient_is_one(zero: str) -> None:
    arrays = make_arrays(LAMB_, 64)
    lr, numel = 0.5, 64
    if zero == "param":
        arrays["param"].zero_()
    else:
        arrays["grad"].zero_()
        arrays["exp_avg"].zero_()
    before = arrays["param"].clone()
    shard = arrays.under(LAMB_.whole(numel, lr=lr, weight_decay=0.0))
    sums = lamb_directions([shard])
    assert (sums[0].param if zero == "param" else sums[0].update) == 0.0
    lamb_apply([shard], sums, bias_correction=False)
    assert torch.equal(arrays["param"], before - lr * arrays["update"])


@pytest.mark.parametrize(("coeffs", "quotient"), [((0.25, 0.5), 0.5), ((64.0, 128.0), 64.0)])
def test_the_quotient_is_kept_between_its_limits(coeffs: tuple[float, float], quotient: float) -> None:
    arrays = make_arrays(LAMB_, 64)
    before = arrays["param"].clone()
    low, high = coeffs
    shard = arrays.under(LAMB_.whole(64, lr=0.5, min_coeff=low, max_coeff=high))
    lamb_apply([shard], [(float(4 * quotient**2 if quotient < 1 else 1), 1.0)], bias_correction=False)
    assert torch.equal(arrays["param"], before - 0.5 * quotient * arrays["update"])


@pytest.mark.parametrize(
    ("sums", "error", "message"),
    [
        ([], ValueError, "sums: 0 pairs, but the shards have 1 segments; must be as many, in the same order"),
        ([(1.0, 1.0)] * 2, ValueError,
         "sums: 2 pairs, but the shards have 1 segments; must be as many, in the same order"),
        ([3.0], TypeError, "sums[0]: 3.0; must be a pair of floats"),
    ],
)  # fmt: skip
def test_bad_sums_are_refused(sums: list[tuple[float, float]], error: type[Exception], message: str) -> None:
    shard = make_arrays(LAMB_, 8).under(LAMB_.whole(8))
    with pytest.raises(error) as caught:
        lamb_apply([shard], sums)
    assert str(caught.value) == message
