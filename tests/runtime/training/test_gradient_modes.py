"""Sums over the ranks in place of means, and steps that a program ends by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch import ConfigError
from tests.runtime.models import batch, loss_of, make_config, make_model, snapshot, worst_difference
from tests.runtime.ranks import Ranks

STEPS, CLIPPING = 3, 6.0  # between the norms: some steps are clipped
TOLERANCE = 1e-5  # of parameters of about 1: sums of another order
SGD = {"type": "SGD", "params": {"lr": 0.1}}
Trained = tuple[dict[str, Tensor], list[float]]


def _own(step: int, rank: int) -> tuple[Tensor, ...]:
    """The three micro batches of a rank; a step may take one, two or all of them."""
    return batch(step).chunk(2)[rank].chunk(3)


def _plain(taken: list[int], factor: float) -> Trained:
    """One process, whose loss is the sum over two ranks, times `factor`."""
    model, norms = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, number in enumerate(taken):
        optimizer.zero_grad()
        losses = [loss_of(model, micro) for rank in range(2) for micro in _own(step, rank)[:number]]
        (factor * torch.stack(losses).sum()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
    return snapshot(model.named_parameters()), norms


def _config(stage: int, **changes: Any) -> dict[str, Any]:
    return make_config(
        stage=stage, reduce_bucket_size=50, optimizer=SGD, gradient_clipping=CLIPPING, **changes
    )


def _summed(rank: int, stage: int, is_direct: bool) -> Trained:
    model, norms = make_model(), []
    changes = {"gradient_allreduce_op": "sum", "gradient_accumulation_steps": 3}
    engine, *_ = dslaunch.initialize(model=model, config=_config(stage, **changes))
    assert engine.gradient_average is False
    for step in range(STEPS):
        for micro in _own(step, rank):
            loss = loss_of(engine, micro)
            if is_direct:
                loss.backward()
            else:
                assert engine.backward(loss).item() == pytest.approx(loss.item() / 3)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    weights = engine.module_state_dict() if stage < 3 else engine._zero3_consolidated_16bit_state_dict()
    engine.destroy()
    return {name: value.clone() for name, value in (weights or {}).items()}, norms  # type: ignore[return-value]


def _check(got: Trained, expected: Trained) -> None:
    assert got[1] == pytest.approx(expected[1], rel=TOLERANCE)
    if got[0]:
        assert worst_difference(got[0], expected[0]) < TOLERANCE


@pytest.mark.parametrize(("stage", "is_direct"), [(0, False), (1, True), (2, False), (3, True)])
def test_gradients_of_the_ranks_are_added_up_where_that_is_asked_for(
    ranks: Ranks, stage: int, is_direct: bool
) -> None:
    expected = _plain([3] * STEPS, 1 / 3)
    assert min(expected[1]) < CLIPPING < max(expected[1])
    for got in ranks(_summed, stage, is_direct, world_size=2):
        _check(got, expected)


def _unmanaged(rank: int, stage: int) -> Trained:
    model, norms = make_model(), []
    changes = {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 3}
    engine, *_ = dslaunch.initialize(model=model, config=_config(stage, **changes))
    assert not engine.managed_gradient_accumulation()
    for step, number in enumerate((1, 3, 2)):
        for micro in _own(step, rank)[:number]:
            assert not engine.is_gradient_accumulation_boundary()
            engine.backward(loss_of(engine, micro))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (3, 2 * 2 * 6, 3)
    for refused in (
        lambda: engine.set_gradient_accumulation_boundary(True),
        engine.coalesce_grad_reduction().__enter__,
    ):
        with pytest.raises(ConfigError, match="managed_gradient_accumulation false"):
            refused()
    weights = engine.module_state_dict() if stage < 3 else engine._zero3_consolidated_16bit_state_dict()
    engine.destroy()
    return {name: value.clone() for name, value in (weights or {}).items()}, norms  # type: ignore[return-value]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_step_updates_after_however_many_backwards(ranks: Ranks, stage: int) -> None:
    for got in ranks(_unmanaged, stage, world_size=2):
        _check(got, _plain([1, 3, 2], 1 / 3 / 2))
