"""AdamW over flat shards: every element against the formula in float64, and every fast path against the plain loop.

Letters: n = elements of the shard, p = param, g = grad, m = exp_avg, v = exp_avg_sq.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import FrozenInstanceError, dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from dslaunch import kernels
from dslaunch.kernels import AdamSegment, AdamShard, adamw_step, adamw_step_reference

# Half a unit in the last place of float32: the largest relative error of one rounded operation.
ROUNDING = 2.0**-24
# How many roundings can add up in each result (coefficients count once each). Counted from the formula, not fitted:
# m: coefficient, scale, product, product, sum. v: the same with g twice. p: decay, product, subtraction.
ROUNDINGS_M = 7
ROUNDINGS_V = 12
ROUNDINGS_P = 4
ROUNDINGS_QUOTIENT = 6  # step size, product, square root, its factor, sum with eps, division
# The smallest positive float32: what is lost when a product falls below the range of normal numbers.
UNDERFLOW = 4 * 2.0**-149
# Twenty steps against torch: each step moves p by about lr and each side rounds it a few times.
TORCH_STEPS = 20
TORCH_TOLERANCE = TORCH_STEPS * 4 * ROUNDING

LENGTHS = sorted(
    {0, 1, 2**18 + 1} | {2**k + d for k in range(1, 17) for d in (-1, 0, 1)}
)  # the last: two threads
GRAD_DTYPES = (torch.float32, torch.bfloat16)
COMBINATIONS = list(itertools.product(GRAD_DTYPES, (False, True), (True, False)))

USUAL = AdamSegment(offset=0, numel=0, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The arrays of one call."""

    param: torch.Tensor  # [n] float32
    grad: torch.Tensor  # [n] float32 or bfloat16
    exp_avg: torch.Tensor  # [n] float32
    exp_avg_sq: torch.Tensor  # [n] float32
    param_out: torch.Tensor | None = None  # [n] bfloat16

    def under(self, segments: Iterable[AdamSegment]) -> tuple[AdamShard]:
        """What the kernel takes, with the gradient in one piece."""
        return (
            AdamShard(
                param=self.param,
                grads=((0, self.grad),),
                exp_avg=self.exp_avg,
                exp_avg_sq=self.exp_avg_sq,
                segments=segments,
                param_out=self.param_out,
            ),
        )

    def arrays(self) -> tuple[torch.Tensor, ...]:
        return (self.param, self.grad, self.exp_avg, self.exp_avg_sq)

    def results(self) -> list[torch.Tensor]:
        return [t for t in (self.param, self.exp_avg, self.exp_avg_sq, self.param_out) if t is not None]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Shard:
        return Shard(
            param=change(self.param),
            grad=change(self.grad),
            exp_avg=change(self.exp_avg),
            exp_avg_sq=change(self.exp_avg_sq),
            param_out=None if self.param_out is None else change(self.param_out),
        )

    def clone(self) -> Shard:
        return self.map(torch.clone)

    def __getitem__(self, part: slice) -> Shard:
        return self.map(lambda t: t[part])


def make_shard(
    numel: int, grad_dtype: torch.dtype = torch.float32, with_out: bool = False, seed: int = 0
) -> Shard:
    generator = torch.Generator().manual_seed(seed)
    param, grad, exp_avg, exp_avg_sq = torch.randn(4, numel, generator=generator).unbind()
    return Shard(
        param=param.clone(),
        grad=grad.to(grad_dtype).clone(),
        exp_avg=exp_avg.clone(),
        exp_avg_sq=exp_avg_sq.square(),
        param_out=torch.full((numel,), 7.0, dtype=torch.bfloat16) if with_out else None,
    )


def whole(numel: int, like: AdamSegment = USUAL) -> tuple[AdamSegment, ...]:
    return (replace(like, offset=0, numel=numel),)


def assert_close(
    name: str, got: torch.Tensor, want: NDArray[np.float64], allowed: NDArray[np.float64]
) -> None:
    error = np.abs(got.numpy().astype(np.float64) - want)
    worst = int(np.argmax(error - allowed))
    assert error[worst] <= allowed[worst], (
        f"{name}[{worst}]: {got[worst]=}, {want[worst]=}, {allowed[worst]=}"
    )


def assert_follows_formula(
    before: Shard, after: Shard, h: AdamSegment, *, adam_w_mode: bool = True, grad_scale: float = 1.0
) -> None:
    """Compare each element with the formula in float64; the allowed error is the sum of what each rounding may do."""
    if before.param.numel() == 0:
        return
    p, g, m, v = (t.float().numpy().astype(np.float64) for t in before.arrays())
    g = g * grad_scale
    g_size = np.abs(g)  # what the roundings of g are relative to: larger than |g| where two terms cancel
    if adam_w_mode:
        p = p * (1 - h.lr * h.weight_decay)
    else:
        g_size = g_size + np.abs(h.weight_decay * p)
        g = g + h.weight_decay * p
    m_size = np.abs(h.beta1 * m) + (1 - h.beta1) * g_size
    v_size = h.beta2 * v + (1 - h.beta2) * g_size**2
    m = h.beta1 * m + (1 - h.beta1) * g
    v = h.beta2 * v + (1 - h.beta2) * g**2
    step_size = h.lr / (1 - h.beta1**h.step)
    denominator = np.sqrt(v) / np.sqrt(1 - h.beta2**h.step) + h.eps
    update = step_size * m / denominator

    m_error = ROUNDINGS_M * ROUNDING * m_size + UNDERFLOW
    v_error = ROUNDINGS_V * ROUNDING * v_size + UNDERFLOW
    root_error = v_error / np.sqrt(np.maximum(v, v_error)) / np.sqrt(1 - h.beta2**h.step)
    update_error = step_size * m_error / denominator + np.abs(update) * (
        root_error / denominator + ROUNDINGS_QUOTIENT * ROUNDING
    )
    p_error = ROUNDINGS_P * ROUNDING * (np.abs(p) + np.abs(update)) + update_error + UNDERFLOW
    assert_close("exp_avg", after.exp_avg, m, m_error)
    assert_close("exp_avg_sq", after.exp_avg_sq, v, v_error)
    assert_close("param", after.param, p - update, p_error)
    if after.param_out is not None:
        assert torch.equal(after.param_out, after.param.bfloat16())


def assert_same_bits(a: Shard, b: Shard) -> None:
    for left, right in zip(a.results(), b.results(), strict=True):
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


# ---- one step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("grad_dtype", "with_out", "adam_w_mode"), COMBINATIONS)
def test_every_element_follows_the_formula_at_every_length(
    grad_dtype: torch.dtype, with_out: bool, adam_w_mode: bool
) -> None:
    for numel in LENGTHS:
        before = make_shard(numel, grad_dtype, with_out, seed=numel)
        after = before.clone()
        adamw_step(after.under(whole(numel)), grad_scale=0.25, adam_w_mode=adam_w_mode, num_threads=2)
        assert_follows_formula(before, after, USUAL, adam_w_mode=adam_w_mode, grad_scale=0.25)
        assert torch.equal(before.grad, after.grad)


@pytest.mark.parametrize(("grad_dtype", "with_out", "adam_w_mode"), COMBINATIONS)
def test_the_fast_loop_has_the_bits_of_the_plain_loop(
    grad_dtype: torch.dtype, with_out: bool, adam_w_mode: bool
) -> None:
    for numel in LENGTHS:
        fast = make_shard(numel, grad_dtype, with_out, seed=numel)
        plain = fast.clone()
        options = {"grad_scale": 1 / 3, "adam_w_mode": adam_w_mode}
        adamw_step(fast.under(whole(numel)), **options)
        adamw_step_reference(plain.under(whole(numel)), **options)
        assert_same_bits(fast, plain)


@pytest.mark.parametrize("start", range(1, 18))
def test_an_unaligned_start_changes_nothing(start: int) -> None:
    numel = 1000
    big = make_shard(start + numel + 3, torch.bfloat16, with_out=True)
    untouched = big.clone()
    part = big[start : start + numel]
    aligned = part.clone()
    adamw_step(part.under(whole(numel)))
    adamw_step(aligned.under(whole(numel)))
    assert_same_bits(part, aligned)
    assert_same_bits(big[:start], untouched[:start])
    assert_same_bits(big[start + numel :], untouched[start + numel :])


def test_the_number_of_threads_changes_no_bit() -> None:
    numel = 300_003
    shards = [make_shard(numel, torch.bfloat16, with_out=True) for _ in range(5)]
    for shard, num_threads in zip(shards, (1, 2, 3, 8, 0), strict=True):
        adamw_step(shard.under(whole(numel)), num_threads=num_threads)
        assert_same_bits(shard, shards[0])


@pytest.mark.parametrize("step", [1, 2, 10, 1000, 10**5, 10**6])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_bias_correction_holds_up_to_a_million_steps(step: int, adam_w_mode: bool) -> None:
    before = make_shard(257)
    after = before.clone()
    hyper = replace(USUAL, step=step)
    adamw_step(after.under(whole(257, hyper)), adam_w_mode=adam_w_mode)
    assert_follows_formula(before, after, hyper, adam_w_mode=adam_w_mode)


@settings(deadline=None)
@given(
    hyper=st.builds(
        AdamSegment,
        offset=st.just(0),
        numel=st.just(65),
        lr=st.floats(0, 1),
        beta1=st.floats(0, 0.9999),
        beta2=st.floats(0, 0.99999),
        eps=st.floats(1e-10, 1e-2),
        weight_decay=st.floats(0, 1),
        step=st.integers(1, 10**6),
    ),
    grad_scale=st.floats(2**-16, 8),
    adam_w_mode=st.booleans(),
    grad_dtype=st.sampled_from(GRAD_DTYPES),
    seed=st.integers(0, 1000),
)
def test_any_hyper_parameters_follow_the_formula(
    hyper: AdamSegment, grad_scale: float, adam_w_mode: bool, grad_dtype: torch.dtype, seed: int
) -> None:
    before = make_shard(65, grad_dtype, with_out=True, seed=seed)
    after = before.clone()
    adamw_step(after.under((hyper,)), grad_scale=grad_scale, adam_w_mode=adam_w_mode)
    assert_follows_formula(before, after, hyper, adam_w_mode=adam_w_mode, grad_scale=grad_scale)


def test_an_infinite_gradient_reaches_only_its_own_element() -> None:
    shard = make_shard(100)
    shard.grad[40] = float("inf")
    adamw_step(shard.under(whole(100)))
    assert torch.isnan(shard.param).nonzero().tolist() == [[40]]


def test_an_infinite_parameter_does_not_reach_the_moments_in_adam_w_mode() -> None:
    shard = make_shard(100)
    shard.param[40] = float("inf")
    adamw_step(shard.under(whole(100)))
    assert torch.isfinite(shard.exp_avg).all()
    assert torch.isfinite(shard.exp_avg_sq).all()


# ---- segments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [adamw_step, adamw_step_reference])
def test_segments_have_their_own_hyper_parameters_and_leave_gaps_alone(step) -> None:  # type: ignore[no-untyped-def]
    together = make_shard(50_000, torch.bfloat16, with_out=True)
    apart = together.clone()
    segments = (
        replace(USUAL, offset=20_000, numel=29_993, lr=1e-2, beta1=0.5),
        replace(USUAL, offset=3, numel=17_000, weight_decay=0.0, step=70),
        replace(USUAL, offset=18_000, numel=0),
        replace(USUAL, offset=17_003, numel=1, eps=1e-3, beta2=0.9),
    )
    step(together.under(segments))
    for segment in segments:
        part = apart[segment.offset : segment.offset + segment.numel]
        step(part.under(whole(segment.numel, segment)))
    assert_same_bits(together, apart)
    untouched = make_shard(50_000, torch.bfloat16, with_out=True)
    for gap in (slice(0, 3), slice(17_004, 20_000), slice(49_993, 50_000)):
        assert_same_bits(together[gap], untouched[gap])


def test_no_segments_change_nothing() -> None:
    shard = make_shard(10, with_out=True)
    adamw_step(shard.under(()))
    assert_same_bits(shard, make_shard(10, with_out=True))


def test_segments_may_come_from_an_iterator() -> None:
    shard, same = make_shard(10), make_shard(10)
    adamw_step(shard.under(iter(whole(10))))
    adamw_step(same.under(whole(10)))
    assert_same_bits(shard, same)


# ---- several shards, and gradients in pieces ---------------------------------------------------------------


@pytest.mark.parametrize("step", [adamw_step, adamw_step_reference])
def test_a_gradient_in_pieces_counts_as_one_and_what_has_none_stays(step) -> None:  # type: ignore[no-untyped-def]
    whole_grad = make_shard(50_000, torch.bfloat16, with_out=True)
    in_pieces = whole_grad.clone()
    # group 1 begins inside the second piece; there is no gradient in [20_000, 20_005) and behind 49_000
    segments = (replace(USUAL, numel=30_001), replace(USUAL, offset=30_001, numel=19_999, lr=0.1, step=9))
    grad = whole_grad.grad
    pieces = [(0, grad[:7]), (7, grad[7:20_000].float()), (20_005, grad[20_005:49_000]), (49_000, grad[:0])]
    (arrays,) = in_pieces.under(segments)
    step([replace(arrays, grads=iter(pieces))])
    step(whole_grad.under(segments))
    untouched = make_shard(50_000, torch.bfloat16, with_out=True)
    for run in (slice(0, 20_000), slice(20_005, 49_000)):
        assert_same_bits(in_pieces[run], whole_grad[run])
    for gap in (slice(20_000, 20_005), slice(49_000, 50_000)):
        assert_same_bits(in_pieces[gap], untouched[gap])


@pytest.mark.parametrize("step", [adamw_step, adamw_step_reference])
def test_several_shards_in_one_call_have_the_bits_of_several_calls(step) -> None:  # type: ignore[no-untyped-def]
    kinds = [(0, False), (5, False), (100_003, True), (70_000, False), (33, True)]
    together = [
        make_shard(numel, torch.bfloat16 if with_out else torch.float32, with_out, seed)
        for seed, (numel, with_out) in enumerate(kinds)
    ]
    apart = [shard.clone() for shard in together]
    hypers = [replace(USUAL, lr=0.01 * (i + 1), step=i + 1) for i in range(len(kinds))]
    step(
        shard.under(whole(shard.param.numel(), hyper))[0]
        for shard, hyper in zip(together, hypers, strict=True)
    )
    for one, other, hyper in zip(together, apart, hypers, strict=True):
        step(other.under(whole(other.param.numel(), hyper)))
        assert_same_bits(one, other)


# ---- beside torch ----------------------------------------------------------------------------------------


@pytest.mark.slow  # the first step of any torch optimizer imports much of torch
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_twenty_steps_equal_torchs_optimizer(adam_w_mode: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    param = torch.randn(1017, generator=generator)
    exp_avg, exp_avg_sq = torch.zeros(2, 1017).unbind()
    torchs = torch.nn.Parameter(param.clone())
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    optimizer = kind([torchs], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for step in range(1, TORCH_STEPS + 1):
        grad = torch.randn(1017, generator=generator)
        torchs.grad = grad.clone()
        optimizer.step()
        segment = AdamSegment(
            offset=0, numel=1017, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=step
        )
        shard = Shard(param=param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        adamw_step(shard.under((segment,)), adam_w_mode=adam_w_mode)
    state = optimizer.state[torchs]
    torch.testing.assert_close(param, torchs.detach(), rtol=TORCH_TOLERANCE, atol=TORCH_TOLERANCE)
    torch.testing.assert_close(exp_avg, state["exp_avg"], rtol=TORCH_TOLERANCE, atol=TORCH_TOLERANCE)
    torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"], rtol=TORCH_TOLERANCE, atol=TORCH_TOLERANCE)


def test_numpy_arrays_serve_as_well_as_tensors() -> None:
    shard = make_shard(33)
    param, grad, exp_avg, exp_avg_sq = (t.numpy().copy() for t in shard.arrays())
    adamw_step(shard.under(whole(33)))
    arrays = AdamShard(
        param=param, grads=[(0, grad)], exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, segments=whole(33)
    )
    adamw_step([arrays])
    assert shard.param.numpy().tobytes() == param.tobytes()


# ---- surface ---------------------------------------------------------------------------------------------


def test_the_public_names_are_these() -> None:
    assert kernels.__all__ == [
        "AdamSegment",
        "AdamShard",
        "adamw_step",
        "adamw_step_reference",
        "squared_norm",
    ]


def test_a_segment_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        USUAL.lr = 1.0  # type: ignore[misc]
