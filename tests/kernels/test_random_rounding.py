"""Rounding to bfloat16 by random bits: of the states and parameters of every element-wise optimizer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dslaunch.runtime.optimizers.random_bits import bits_of_param, bits_of_states, round_by, seed_of
from tests.exhaustive import few
from tests.kernels.optimizers import (
    ADAM,
    OPTIMIZERS,
    Arrays,
    Optimizer,
    assert_same_bits,
    make_arrays,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SEED = 0x9ABCDEF0
ELEMENTWISE = [one for one in OPTIMIZERS if not one.name.startswith("LAMB")]
DTYPES = [
    (param, grad, state, out)
    for param, grad, state in itertools.product((FP32, BF16), (FP32, BF16, FP16), (FP32, BF16))
    for out in ((None, BF16) if param is BF16 else (None, FP32, BF16, FP16))
]
HOST = torch.device("cpu")


def arrays_of(optimizer: Optimizer, numel: int, dtypes: tuple[Any, ...], *, seed: int = 0) -> Arrays:
    param, grad, state, out = dtypes
    arrays = make_arrays(optimizer, numel, grad=grad, state=state, out=out, seed=seed)
    arrays.tensors["param"] = arrays["param"].to(param)
    return arrays


def expected(optimizer: Optimizer, before: Arrays, segment: Any, **options: Any) -> Arrays:
    """What the same step leaves in float32, rounded by torch's operations."""
    wide = before.clone()
    out = wide.tensors.pop("param_out", None)
    for name in ("param", *optimizer.states):
        wide.tensors[name] = before[name].to(FP32, copy=True)
    optimizer.run([wide.under((replace(segment, seed=None),))], **options)
    at = slice(segment.offset, segment.offset + segment.numel)
    bits = bits_of_states(segment.seed, segment.first, segment.numel, HOST)
    after = before.clone()
    for place, name in enumerate(optimizer.states):
        rounded(after[name][at], wide[name][at], bits >> 16 * place)
    rounded(
        after["param"][at],
        wide["param"][at],
        bits_of_param(segment.seed, segment.first, segment.numel, HOST),
    )
    if out is not None:
        after["param_out"][at] = after["param"][at].to(out.dtype)
    return after


def rounded(to: Tensor, values: Tensor, bits: Tensor) -> None:
    to.copy_(values if to.dtype is FP32 else round_by(bits, values))


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=str)
@pytest.mark.parametrize(
    ("param", "grad", "state", "out"), few(DTYPES, lambda param, grad, state, out: grad is BF16), ids=str
)
def test_what_is_kept_is_rounded_by_the_bits_of_its_place(
    optimizer: Optimizer,
    param: torch.dtype,
    grad: torch.dtype,
    state: torch.dtype,
    out: torch.dtype | None,
) -> None:
    dtypes = (param, grad, state, out)
    for numel, first in ((1, 0), (300, 17), (2**14 + 1, 2**32 - 100)):
        before = arrays_of(optimizer, numel + 7, dtypes, seed=numel)
        segment = replace(optimizer.segment, offset=5, numel=numel, seed=SEED, first=first)
        after = expected(optimizer, before, segment, grad_scale=1 / 3)
        for fast in (True, False):
            stepped = before.clone()
            optimizer.run([stepped.under((segment,))], fast=fast, grad_scale=1 / 3)
            assert_same_bits(stepped, after)


def test_the_bits_are_those_of_the_place_however_a_parameter_is_cut() -> None:
    (adam, *_), numel, first = ADAM, 70_000, 2**32 - 30_000
    whole = arrays_of(adam, numel, (BF16, BF16, BF16, None))
    cut = whole.clone()
    adam.run([whole.under(adam.whole(numel, seed=SEED, first=first))])
    segments = [
        replace(adam.segment, offset=low, numel=high - low, seed=SEED, first=first + low)
        for low, high in itertools.pairwise((0, 1, 4099, 30_000, 61_001, numel))
    ]
    adam.run([cut.under(segments)], num_threads=2)
    assert_same_bits(cut, whole)


def test_the_mean_of_many_steps_is_exact() -> None:
    """A value between two neighbours is rounded up as often as it is near the upper one."""
    numel = 2**16
    for share in (0.0, 1 / 256, 0.3, 0.5, 0.9, 1.0):
        value = torch.full((numel,), 1 + share * 2**-7)
        for bits in (
            bits_of_states(seed_of("a", 1), 0, numel, HOST),
            bits_of_states(seed_of("a", 1), 0, numel, HOST) >> 16,
            bits_of_param(seed_of("a", 1), 0, numel, HOST),
        ):
            up = (round_by(bits, value).float() - 1) * 2**7
            deviation = (share * (1 - share) / numel) ** 0.5
            assert abs(up.mean().item() - share) <= 5 * deviation


def test_bits_of_neighbours_steps_and_arrays_do_not_follow_one_another() -> None:
    numel = 2**16
    bits = bits_of_states(seed_of("a", 1), 0, numel, HOST)
    halves = [one & 0xFFFF for one in (bits, bits >> 16)]
    others = [
        halves[1],
        bits_of_param(seed_of("a", 1), 0, numel, HOST) & 0xFFFF,
        bits_of_states(seed_of("a", 2), 0, numel, HOST) & 0xFFFF,
        bits_of_states(seed_of("b", 1), 0, numel, HOST) & 0xFFFF,
        halves[0].roll(1),
        halves[0].roll(256),
    ]
    for other in others:
        pair = torch.stack([halves[0], other]).double()
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 5 / numel**0.5
        # 16 cells for each of the highest and the lowest two bits of both
        for shift in (14, 0):
            cells = torch.bincount(((halves[0] >> shift & 3) * 4 + (other >> shift & 3)), minlength=16)
            square = ((cells - numel / 16) ** 2 / (numel / 16)).sum().item()
            assert square < 50, "a chi square of 15 degrees that one of 100,000 exceeds"


def test_what_a_bfloat16_holds_stays_and_what_is_no_number_stays_none() -> None:
    values = torch.tensor([0.0, -0.0, 1.5, float("inf"), -float("inf"), float("nan")])
    for bits in (0, 0x7FFF, 0xFFFF):
        got = round_by(torch.full((6,), bits, dtype=torch.int32), values)
        assert torch.equal(got.float()[:5], values[:5])
        assert got[5].isnan()
    arrays = arrays_of(ADAM[0], 4, (BF16, BF16, BF16, None))
    arrays["grad"][1], arrays["grad"][2] = float("inf"), float("nan")
    ADAM[0].run([arrays.under(ADAM[0].whole(4, seed=SEED))])
    assert arrays["exp_avg_sq"].isfinite().tolist() == [True, False, False, True]
    assert arrays["exp_avg_sq"][1] == float("inf")


def test_arguments_that_would_lose_values_are_refused() -> None:
    adam = ADAM[0]
    narrow = arrays_of(adam, 4, (BF16, BF16, BF16, None))
    with pytest.raises(ValueError, match=r"segments\[0\].seed: None, but shards\[0\].param is bfloat16"):
        adam.run([narrow.under(adam.whole(4))])
    with pytest.raises(TypeError, match=r"param_out: dtype float32, but shards\[0\].param has bfloat16"):
        adam.run([arrays_of(adam, 4, (BF16, BF16, BF16, FP32)).under(adam.whole(4, seed=1))])
    with pytest.raises(ValueError, match=r"seed: 4294967296; must be None or fit in 32 bits"):
        adam.run([narrow.under(adam.whole(4, seed=2**32))])
    with pytest.raises(ValueError, match=r"first: -1; must be >= 0"):
        adam.run([narrow.under(adam.whole(4, seed=1, first=-1))])
    lamb = OPTIMIZERS[-1]
    with pytest.raises(ValueError, match="LAMB rounds to nearest"):
        lamb.run([make_arrays(lamb, 4).under(lamb.whole(4, seed=1))])
    with pytest.raises(TypeError, match="param: dtype bfloat16"):
        lamb.run([arrays_of(lamb, 4, (BF16, BF16, FP32, None)).under(lamb.whole(4))])
