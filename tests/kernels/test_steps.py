"""One step of every optimizer: each element against the formula in float64,
each fast loop against the plain one.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from tests.exhaustive import few
from tests.kernels.optimizers import (
    OPTIMIZERS,
    Optimizer,
    assert_follows_formula,
    assert_same_bits,
    make_arrays,
)

# 2^18 + 1 elements take two threads; 2^14 is a block.
LENGTHS = sorted({0, 1, 2**18 + 1} | {2**k + d for k in range(1, 17) for d in (-1, 0, 1)})
FEW_LENGTHS = (0, 1, 63, 64, 65, 2**14 - 1, 2**14 + 1)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
USUAL_DTYPES = [(FP32, FP32, None), (BF16, FP32, BF16), (FP16, BF16, FP16)]
ALL_DTYPES = list(itertools.product((FP32, BF16, FP16), (FP32, BF16), (None, FP32, BF16, FP16)))

every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
fast_and_plain = pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "grad", "state", "out"),
    few(
        [(optimizer, *dtypes) for optimizer in OPTIMIZERS for dtypes in USUAL_DTYPES],
        lambda optimizer, *dtypes: optimizer is OPTIMIZERS[0] or dtypes == USUAL_DTYPES[1],
    ),
    ids=str,
)
def test_every_element_follows_the_formula_at_every_length(
    optimizer: Optimizer, grad: torch.dtype, state: torch.dtype, out: torch.dtype | None
) -> None:
    for numel in LENGTHS:
        before = make_arrays(optimizer, numel, grad=grad, state=state, out=out, seed=numel)
        after = before.clone()
        segments = optimizer.whole(numel)
        optimizer.run([after.under(segments)], grad_scale=0.25, num_threads=2)
        assert_follows_formula(before, after, segments[0], grad_scale=0.25)


@every_optimizer
@pytest.mark.parametrize(
    ("grad", "state", "out"),
    few(ALL_DTYPES, lambda grad, state, out: grad is BF16 or (grad, state, out) in USUAL_DTYPES),
    ids=str,
)
def test_all_dtypes_follow_the_formula_and_the_fast_loop_has_the_bits_of_the_plain_one(
    optimizer: Optimizer, grad: torch.dtype, state: torch.dtype, out: torch.dtype | None
) -> None:
    for numel in FEW_LENGTHS:
        before = make_arrays(optimizer, numel, grad=grad, state=state, out=out, seed=numel)
        fast, plain = before.clone(), before.clone()
        segments = optimizer.whole(numel)
        optimizer.run([fast.under(segments)], grad_scale=1 / 3)
        optimizer.run([plain.under(segments)], fast=False, grad_scale=1 / 3)
        assert_follows_formula(before, plain, segments[0], grad_scale=1 / 3)
        assert_same_bits(fast, plain)


@every_optimizer
def test_an_unaligned_start_changes_nothing(optimizer: Optimizer) -> None:
    numel = 1000
    for start in range(1, 18):
        big = make_arrays(optimizer, start + numel + 3, grad=BF16, out=FP16)
        untouched = big.clone()
        part = big[start : start + numel]
        aligned = part.clone()
        optimizer.run([part.under(optimizer.whole(numel))])
        optimizer.run([aligned.under(optimizer.whole(numel))])
        assert_same_bits(part, aligned)
        assert_same_bits(big[:start], untouched[:start])
        assert_same_bits(big[start + numel :], untouched[start + numel :])


@every_optimizer
def test_the_number_of_threads_changes_no_bit(optimizer: Optimizer) -> None:
    numel = 300_003
    plain = make_arrays(optimizer, numel, grad=BF16, out=BF16)
    optimizer.run([plain.under(optimizer.whole(numel))], fast=False)
    for num_threads in (1, 2, 3, 8, 0):
        fast = make_arrays(optimizer, numel, grad=BF16, out=BF16)
        optimizer.run([fast.under(optimizer.whole(numel))], num_threads=num_threads)
        assert_same_bits(fast, plain)


@every_optimizer
@pytest.mark.parametrize("step", [1, 2, 10, 1000, 10**5, 10**6])
def test_the_formula_holds_up_to_a_million_steps(optimizer: Optimizer, step: int) -> None:
    if not optimizer.kernel.counts_steps:
        pytest.skip("it counts none")
    before = make_arrays(optimizer, 257)
    after = before.clone()
    segments = optimizer.whole(257, step=step)
    optimizer.run([after.under(segments)])
    assert_follows_formula(before, after, segments[0])


@every_optimizer
@given(data=st.data())
def test_any_hyper_parameters_follow_the_formula(optimizer: Optimizer, data: st.DataObject) -> None:
    hyper = data.draw(st.fixed_dictionaries(dict(optimizer.any_hyper)), label="hyper")
    grad_scale = data.draw(st.floats(2**-16, 8), label="grad_scale")
    grad, state, out = data.draw(st.sampled_from(ALL_DTYPES), label="dtypes")
    before = make_arrays(optimizer, 65, grad=grad, state=state, out=out, seed=data.draw(st.integers(0, 1000)))
    after, plain = before.clone(), before.clone()
    segments = optimizer.whole(65, **hyper)
    optimizer.run([after.under(segments)], grad_scale=grad_scale)
    optimizer.run([plain.under(segments)], fast=False, grad_scale=grad_scale)
    assert_follows_formula(before, after, segments[0], grad_scale=grad_scale)
    assert_same_bits(after, plain)


# ---- segments --------------------------------------------------------------------------------------------


@every_optimizer
@fast_and_plain
def test_segments_have_their_own_hyper_parameters_and_leave_gaps_alone(
    optimizer: Optimizer, fast: bool
) -> None:
    together = make_arrays(optimizer, 50_000, grad=BF16, out=BF16)
    untouched, apart = together.clone(), together.clone()
    usual = optimizer.segment
    segments = (
        replace(usual, offset=20_000, numel=29_993, **optimizer.another),
        replace(usual, offset=3, numel=17_000, weight_decay=0.0),
        replace(usual, offset=18_000, numel=0),
        replace(usual, offset=17_003, numel=1, lr=0.5),
    )
    optimizer.run([together.under(segments)], fast=fast)
    for segment in segments:
        part = apart[segment.offset : segment.offset + segment.numel]
        optimizer.run([part.under((replace(segment, offset=0),))], fast=fast)
    assert_same_bits(together, apart)
    for gap in (slice(0, 3), slice(17_004, 20_000), slice(49_993, 50_000)):
        assert_same_bits(together[gap], untouched[gap])
    assert not torch.equal(together["param"], untouched["param"])


@every_optimizer
def test_no_segments_change_nothing(optimizer: Optimizer) -> None:
    arrays = make_arrays(optimizer, 10, out=BF16)
    optimizer.run([arrays.under(())])
    assert_same_bits(arrays, make_arrays(optimizer, 10, out=BF16))


@every_optimizer
@fast_and_plain
def test_segments_and_pieces_may_come_from_iterators(optimizer: Optimizer, fast: bool) -> None:
    arrays, same = make_arrays(optimizer, 10), make_arrays(optimizer, 10)
    shard = arrays.under(iter(optimizer.whole(10)))
    optimizer.run(iter([replace(shard, grads=iter(shard.grads))]), fast=fast)
    optimizer.run([same.under(optimizer.whole(10))], fast=fast)
    assert_same_bits(arrays, same)


# ---- several shards, and gradients in pieces --------------------------------------------------------------


@every_optimizer
@fast_and_plain
def test_a_gradient_in_pieces_counts_as_one_and_what_has_none_stays(optimizer: Optimizer, fast: bool) -> None:
    if optimizer.name.startswith("LAMB"):
        pytest.skip("what has no gradient changes the norms: see test_lamb.py")
    whole = make_arrays(optimizer, 50_000, grad=BF16, out=BF16)
    untouched, in_pieces = whole.clone(), whole.clone()
    # the second segment begins inside the second piece; there is no gradient in
    # [20_000, 20_005) and behind 49_000
    segments = (
        replace(optimizer.segment, numel=30_001),
        replace(optimizer.segment, offset=30_001, numel=19_999, **optimizer.another),
    )
    grad = whole["grad"]
    pieces = [(0, grad[:7]), (7, grad[7:20_000].float()), (20_005, grad[20_005:49_000]), (49_000, grad[:0])]
    optimizer.run([replace(in_pieces.under(segments), grads=pieces)], fast=fast)
    optimizer.run([whole.under(segments)], fast=fast)
    for run in (slice(0, 20_000), slice(20_005, 49_000)):
        assert_same_bits(in_pieces[run], whole[run])
    for gap in (slice(20_000, 20_005), slice(49_000, 50_000)):
        assert_same_bits(in_pieces[gap], untouched[gap])


@every_optimizer
@fast_and_plain
def test_several_shards_in_one_call_have_the_bits_of_several_calls(optimizer: Optimizer, fast: bool) -> None:
    kinds = [(0, FP32, None), (5, FP16, None), (100_003, BF16, BF16), (70_000, FP32, FP32), (33, BF16, FP16)]
    together = [
        make_arrays(optimizer, numel, grad=grad, out=out, seed=seed)
        for seed, (numel, grad, out) in enumerate(kinds)
    ]
    apart = [arrays.clone() for arrays in together]
    segments = [optimizer.whole(numel, lr=0.01 * (i + 1)) for i, (numel, *_) in enumerate(kinds)]
    optimizer.run(
        (arrays.under(of_shard) for arrays, of_shard in zip(together, segments, strict=True)), fast=fast
    )
    for one, other, of_shard in zip(together, apart, segments, strict=True):
        optimizer.run([other.under(of_shard)], fast=fast)
        assert_same_bits(one, other)


# ---- values that are no numbers ---------------------------------------------------------------------------


@every_optimizer
def test_a_gradient_that_is_no_number_reaches_only_its_own_element(optimizer: Optimizer) -> None:
    if optimizer.name.startswith("LAMB"):
        pytest.skip("it reaches the norm, and so every element")
    for bad in (float("nan"), float("inf")):
        arrays = make_arrays(optimizer, 100)
        arrays["grad"][40] = bad
        optimizer.run([arrays.under(optimizer.whole(100))])
        of_params = torch.isfinite(arrays["param"])
        assert of_params.sum() >= 99
        if not optimizer.takes_signs or bad != bad:  # the sign of infinity is 1
            assert not of_params[40]
        for name in optimizer.states:
            assert (~torch.isfinite(arrays[name])).nonzero().tolist() in ([[40]], [])
