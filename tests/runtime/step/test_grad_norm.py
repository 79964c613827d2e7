"""The gradient norm and the clip factor."""

from __future__ import annotations

from math import inf, isinf, isnan, nan

import pytest
import torch
from torch import nn

import dslaunch
from dslaunch.runtime.step.grad_norm import clip_factor
from tests.runtime.models import batch, loss_of, make_config, make_model
from tests.runtime.ranks import Ranks


@pytest.mark.parametrize(
    ("norm", "max_norm", "factor"),
    [(0.5, 1.0, 1.0), (2.0, 1.0, 1.0 / (2.0 + 1e-6)), (2.0, 0.0, 1.0), (0.0, 1.0, 1.0), (1e300, 1.0, 1e-300)],
)
def test_gradients_are_scaled_down_to_the_limit_and_never_up(
    norm: float, max_norm: float, factor: float
) -> None:
    assert clip_factor(norm, max_norm=max_norm) == pytest.approx(factor, rel=1e-12)


def _norm(rank: int, stage: int, bf16: bool) -> tuple[float, float]:
    """Return the engine's norm and torch's over the gradients of the whole batch."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    plain = make_model().to(dtype)
    parts = batch(0).to(dtype).chunk(torch.distributed.get_world_size())
    total: list[torch.Tensor] = [torch.zeros_like(param, dtype=torch.float32) for param in plain.parameters()]
    for part in parts:
        plain.zero_grad()
        loss_of(plain, part).backward()
        for mean, param in zip(total, plain.parameters(), strict=True):
            assert param.grad is not None
            mean += param.grad.float() / len(parts)
    for mean, param in zip(total, plain.parameters(), strict=True):
        param.grad = mean.to(dtype)
    expected = torch.nn.utils.clip_grad_norm_([*plain.float().parameters()], inf)
    config = make_config(stage=stage, bf16={"enabled": bf16}, gradient_clipping=1e-3)
    engine, *_ = dslaunch.initialize(model=make_model(), config=config)
    engine.backward(loss_of(engine, parts[rank]))
    engine.step()
    norm = engine.get_global_grad_norm()
    assert norm is not None
    return norm, float(expected)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_norm_is_clip_grad_norms_before_clipping(ranks: Ranks, world_size: int, bf16: bool) -> None:
    first, *others = [ranks(_norm, stage, bf16, world_size=world_size) for stage in (0, 1, 2, 3)]
    assert all(other == first for other in others)  # equal to the bit, across stages
    for norm, expected in first:
        assert norm == first[0][0]  # and across ranks
        assert norm == pytest.approx(expected, rel=1e-6)  # torch adds in float32


def _overflowing(rank: int, value: float) -> float | None:
    model = nn.Linear(7, 1)
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=1))
    with engine.no_sync():  # the step averages
        engine.backward(engine(batch(0, size=2)).sum())
    if rank == 1:
        assert model.weight.grad is not None
        model.weight.grad[0, 6] = value
    engine.step()
    return engine.get_global_grad_norm()


def test_squares_that_float32_cannot_hold_are_no_infinity(ranks: Ranks) -> None:
    for norm in ranks(_overflowing, 2e30, world_size=2):
        assert norm == pytest.approx(1e30, rel=1e-6)


def test_infinity_and_nan_come_through_to_every_rank(ranks: Ranks) -> None:
    assert all(norm is not None and isinf(norm) for norm in ranks(_overflowing, inf, world_size=2))
    assert all(norm is not None and isnan(norm) for norm in ranks(_overflowing, nan, world_size=2))
