"""A job whose ranks hold two models: what the ranks of one of them do, and those of the other do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.errors import CollectiveError
from dslaunch.shared.axes import Axes
from dslaunch.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.runtime.mesh.test_domains import arranged
from tests.runtime.models import Uneven, loss_of, make_config, make_model
from tests.runtime.ranks import Ranks
from tests.runtime.training.test_skipped import Lines

AXES = Axes(pp=2, dp=2)  # ranks 0 and 1 hold one model, 2 and 3 the other
STEPS = 4
CLIP = 0.05  # below every norm here
DEADLINE_S = 60.0  # where ranks that wait for each other would wait for ever


class Alike(nn.Module):
    """Units of one size, in an order that may be changed: nothing stops ranks with other orders."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7, bias=False) for _ in range(6))
        self.order = (0, 1, 2, 3, 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = x + torch.tanh(self.blocks[index](x))
        return x


KINDS: tuple[type[nn.Module], ...] = (Uneven, Alike)


def _batch(step: int) -> Tensor:
    return torch.randn(16, 7, generator=torch.Generator().manual_seed(1000 + step))


def _engine(rank: int, stage: int, **changes: Any) -> tuple[dslaunch.Engine, nn.Module, int]:
    """Return it, its model and which of the two that is."""
    number = AXES.coordinates(rank)["pp"]
    settings = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
    }
    config = make_config(stage=stage, reduce_bucket_size=50, **{**settings, **changes})
    with arranged(AXES):
        model = make_model(KINDS[number])
        engine, *_ = dslaunch.initialize(model=model, config=config)
    return engine, model, number


def _micro_batches(rank: int, step: int) -> Sequence[Tensor]:
    return _batch(step).chunk(2)[AXES.coordinates(rank)["dp"]].chunk(2)


def _step(engine: dslaunch.Engine, rank: int, step: int, *, factor: float = 1.0) -> None:
    for micro_batch in _micro_batches(rank, step):
        engine.backward(loss_of(engine, micro_batch) * factor)
        engine.step()


# ---- what programs ask for


def _look(rank: int, stage: int) -> dict[str, Tensor]:
    """Ask for one parameter after the other, and evaluate one of the models only."""
    engine, model, number = _engine(rank, stage)
    seen = {}
    for step in range(2):
        for micro_batch in _micro_batches(rank, step):
            engine.backward(loss_of(engine, micro_batch))
            grads = {name: safe_get_full_grad(param) for name, param in model.named_parameters()}
            engine.step()
        seen = seen or grads
        for param in model.parameters():
            with dslaunch.zero.GatheredParameters([param]):
                float(param.detach().sum())
        if number == step:
            with torch.no_grad():
                for _ in range(2):
                    engine(_batch(step))
    engine.destroy()
    return seen


@pytest.mark.parametrize("stage", [0, 3])
def test_models_need_not_have_as_many_parameters_to_look_at(ranks: Ranks, stage: int) -> None:
    for rank, seen in enumerate(ranks(_look, stage, world_size=4, deadline_s=DEADLINE_S)):
        model = make_model(KINDS[rank // 2])
        loss_of(model, _batch(0)).backward()  # type: ignore[no-untyped-call]
        for name, param in model.named_parameters():
            torch.testing.assert_close(seen[name], param.grad, msg=name)


# ---- what changes in one of them


def _freeze(rank: int, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    """For two steps the second model trains two of its blocks less."""
    engine, model, number = _engine(rank, stage)
    norms = []
    for step in range(STEPS):
        if number == 1:
            _set_frozen(model, step in (1, 2))
        _step(engine, rank, step)
        norms.append(engine.get_global_grad_norm() or 0.0)
    trained = {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
    engine.destroy()
    return norms, trained


def _set_frozen(model: nn.Module, is_frozen: bool) -> None:
    for index in (0, 3):
        model.get_submodule(f"blocks.{index}").requires_grad_(not is_frozen)


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_one_model_freezes_for_a_while_stay(ranks: Ranks, stage: int) -> None:
    models = [make_model(kind) for kind in KINDS]
    params = [param for model in models for param in model.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.9)
    norms = []
    for step in range(STEPS):
        _set_frozen(models[1], step in (1, 2))
        optimizer.zero_grad()
        sum(loss_of(model, _batch(step)) for model in models).backward()  # type: ignore[union-attr]
        norms.append(float(nn.utils.clip_grad_norm_(params, CLIP)))
        optimizer.step()
    for rank, (own, trained) in enumerate(ranks(_freeze, stage, world_size=4, deadline_s=DEADLINE_S)):
        assert own == pytest.approx(norms, rel=1e-6)
        for name, value in models[rank // 2].named_parameters():
            torch.testing.assert_close(trained[name], value.detach(), rtol=2e-6, atol=2e-6, msg=name)


def _freeze_on_one(rank: int) -> str:
    engine, model, _ = _engine(rank, 1)
    if rank == 3:
        _set_frozen(model, True)
    with pytest.raises(dslaunch.ConfigError) as caught:
        _step(engine, rank, 0)
    return str(caught.value)


def test_ranks_of_one_model_that_freeze_other_parameters_are_named_in_the_whole_job(ranks: Ranks) -> None:
    said = ranks(_freeze_on_one, world_size=4)
    assert said == [said[0]] * 4
    assert said[0].startswith("rank 3 and rank 2 do not train the same: parameters 'blocks.0.weight'")


# ---- steps that are skipped


def _overflow(rank: int, stage: int) -> tuple[list[bool], float, list[str]]:
    """A gradient of the second model is infinite on rank 3 in one step."""
    changes = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
    engine, model, _ = _engine(rank, stage, **changes)
    poisoned = model.get_parameter("blocks.4.weight") if rank == 3 else None
    applied = []
    with Lines() as lines:
        for step in range(3):
            hooks = [] if poisoned is None or step != 1 else [poisoned.register_hook(lambda grad: grad / 0)]
            for micro_batch in _micro_batches(rank, step):
                engine.backward(loss_of(engine, micro_batch.half()))
                engine.step()
            for hook in hooks:
                hook.remove()
            applied.append(engine.was_step_applied())
    scale = engine.optimizer.loss_scale
    engine.destroy()
    return applied, scale, lines.found


@pytest.mark.parametrize("stage", [0, 3])
def test_an_overflow_in_one_model_skips_the_step_of_both_and_is_told_with_its_place(
    ranks: Ranks, stage: int
) -> None:
    results = ranks(_overflow, stage, world_size=4)
    assert [(applied, scale) for applied, scale, _ in results] == [([True, False, True], 128.0)] * 4
    assert [len(lines) for *_, lines in results] == [1, 0, 0, 0]
    (line,) = results[0][2]
    assert "first in unit 'blocks.4' (parameter 'blocks.4.weight') of the model of rank 2;" in line


# ---- the order of collectives


def _go_apart(rank: int, is_evaluation: bool) -> str:
    """Rank 3 takes its units in another order than rank 2; return the first error."""
    engine, model, _ = _engine(rank, 3)
    if rank == 3:
        model.order = (0, 1, 2, 4, 3, 5)  # type: ignore[assignment]
    try:
        for _ in range(2):
            if is_evaluation:
                with torch.no_grad():
                    engine(_batch(0))
            else:
                _step(engine, rank, 0)
    except CollectiveError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_another_order_is_told_by_the_ranks_of_that_model(ranks: Ranks, is_evaluation: bool) -> None:
    """Before a step all ranks of the job learn it; after an evaluation, those that evaluated."""
    results = ranks(_go_apart, is_evaluation, world_size=4, deadline_s=DEADLINE_S)
    if is_evaluation:
        assert results[:2] == ["", ""]
        results = results[2:]
    assert results == [results[0]] * len(results)
    assert results[0].startswith(("rank 3's collective ", "rank 3 (stage 1 of 2, dp 1)'s collective "))
    assert "'s was all_gather of unit 'blocks." in results[0]
