"""Norms and clipping of gradients, against sums in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import dslaunch
from dslaunch.runtime.compat import grad_norm
from dslaunch.runtime.errors import ConfigError
from tests.runtime.models import make_config
from tests.runtime.ranks import Ranks

SHAPES = ((3, 5), (7,), (1,), (2, 2, 2))
REL = 8 * 2.0**-24  # a norm of norms, a quotient and a product in float32, with 31 elements


def _params(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return [*params, torch.nn.Parameter(torch.zeros(2))]  # the last one has no gradient


def _exact(params: list[torch.nn.Parameter], norm_type: float) -> float:
    values = [
        abs(v) for param in params if param.grad is not None for v in param.grad.double().flatten().tolist()
    ]
    return max(values) if norm_type == math.inf else sum(v**norm_type for v in values) ** (1 / norm_type)


@pytest.mark.parametrize("norm_type", [2, 1, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_gradients_are_scaled_to_the_norm_and_never_up(norm_type: float, max_norm: float) -> None:
    params = _params()
    before = [param.grad.clone() for param in params if param.grad is not None]
    exact = _exact(params, norm_type)
    found = grad_norm.clip_grad_norm_(iter(params), max_norm, norm_type)
    assert found.item() == pytest.approx(exact, rel=REL)
    scale = min(1.0, max_norm / (exact + 1e-6))
    for param, old in zip(params, before, strict=False):
        torch.testing.assert_close(param.grad.double(), old.double() * scale, rtol=REL, atol=0.0)
        if scale == 1.0:
            assert torch.equal(param.grad, old)
    assert grad_norm.get_global_norm_of_tensors(before, norm_type).item() == pytest.approx(exact, rel=REL)


def test_one_tensor_and_none() -> None:
    (first, *_) = _params()
    exact = _exact([first], 2)
    assert grad_norm.clip_grad_norm_(first, 1.0).item() == pytest.approx(exact, rel=REL)
    assert grad_norm.clip_grad_norm_([], 1.0).item() == 0.0


def _on_each(rank: int) -> tuple[float, list[float], float]:
    params = _params(seed=rank)
    norm = grad_norm.clip_grad_norm_(params, 0.25)
    assert params[0].grad is not None
    return norm.item(), params[0].grad.flatten().tolist(), _exact(_params(seed=rank), 2)


def test_the_norm_is_averaged_over_the_ranks(ranks: Ranks) -> None:
    answers = ranks(_on_each, world_size=2)
    mean = sum(exact for *_, exact in answers) / 2
    for rank, (norm, values, _) in enumerate(answers):
        assert norm == pytest.approx(mean, rel=REL)
        grad = _params(seed=rank)[0].grad
        assert grad is not None
        assert values == pytest.approx(
            [v * 0.25 / (mean + 1e-6) for v in grad.double().flatten().tolist()], rel=REL
        )


def _of_an_engine(rank: int) -> None:
    engine: Any = dslaunch.initialize(model=torch.nn.Linear(7, 7), config=make_config(stage=2))[0]
    with pytest.raises(ConfigError, match=r"of 'weight', which an engine has: .* set gradient_clipping"):
        grad_norm.clip_grad_norm_(engine.parameters(), 1.0)
    engine.destroy()


@pytest.mark.slow
def test_what_an_engine_clips_is_left_to_it(ranks: Ranks) -> None:
    ranks(_of_an_engine, world_size=1)
    with pytest.raises(ConfigError, match=r"^clip_grad_norm_\(\): engine.step\(\) clips by the norm"):
        grad_norm.clip_grad_norm_(_params(), 1.0, mpu=object())


def test_norms_of_parts_make_that_of_the_whole() -> None:
    assert grad_norm.get_global_norm([3.0, torch.tensor(4.0)]) == 5.0
    assert grad_norm.get_global_norm([]) == 0.0
    for wrong in (-1.0, math.inf, math.nan, torch.tensor(math.nan)):
        assert grad_norm.get_global_norm([3.0, wrong]) == math.inf
    assert grad_norm.is_invalid_grad_norm(torch.tensor([1.0, -1.0]))
    assert not grad_norm.is_invalid_grad_norm(torch.tensor([1.0, 0.0]))


def test_tensors_are_scaled_by_their_own_norm_or_a_given_one() -> None:
    def given() -> list[torch.Tensor]:
        return [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]

    tensors = given()
    assert float(grad_norm.clip_tensors_by_global_norm(tensors, max_norm=1.0)) == 5.0
    assert [v for one in tensors for v in one.flatten().tolist()] == pytest.approx([0.6, 0.0, 0.8], rel=1e-6)
    tensors = given()
    assert grad_norm.clip_tensors_by_global_norm(tensors, max_norm=5.0, global_norm=10.0) == 10.0
    assert [v for one in tensors for v in one.flatten().tolist()] == pytest.approx([1.5, 0.0, 2.0], rel=1e-6)
    tensors = given()
    grad_norm.clip_tensors_by_global_norm(tensors, max_norm=50.0)
    assert all(map(torch.equal, tensors, given()))
    assert grad_norm.get_global_norm_of_tensors([torch.tensor([math.inf])]).item() == -1.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, -2.0], False), ([], False), ([1.0, math.nan], True), ([-math.inf], True), ([math.inf], True)],
)
def test_what_is_not_finite_is_found(values: list[float], expected: bool) -> None:
    assert bool(grad_norm.has_inf_or_nan(torch.tensor(values))) is expected
    sparse = torch.sparse_coo_tensor(
        torch.arange(len(values)).view(1, -1), torch.tensor(values), (9,), check_invariants=True
    )
    assert bool(grad_norm.has_inf_or_nan(sparse)) is expected
