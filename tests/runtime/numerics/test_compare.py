"""What `dslaunch numerics` finds of a training, and what it does not: rounding."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import dslaunch
from dslaunch.runtime.engine.optimizer_step import OptimizerStep
from dslaunch.runtime.numerics.report import lines_of
from tests.runtime.models import make_config, make_model, train_engine
from tests.runtime.numerics.runs import compared
from tests.runtime.ranks import RankFailed, Ranks

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


def training(rank: int, changes: dict[str, Any], dtype: str = "float32") -> None:
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(**changes))
    train_engine(engine, steps=3, dtype=getattr(torch, dtype))


def doubled(rank: int, changes: dict[str, Any]) -> None:
    """The updates take twice the gradients."""
    update = OptimizerStep._update
    with patch.object(OptimizerStep, "_update", lambda self, scale: update(self, 2 * scale)):
        training(rank, changes)


def growing(rank: int) -> None:
    """The updates are so large that a difference of a bit is one of the whole value some steps later."""
    optimizer = {"type": "SGD", "params": {"lr": 30.0}}
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(stage=2, optimizer=optimizer))
    train_engine(engine, steps=12)


class Masked(torch.nn.Module):
    """Layers whose input is masked as numpy and Python's random say; nobody gives them seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs * (random.random() + np.random.random()))


def masked(rank: int) -> None:
    engine, *_ = dslaunch.initialize(model=Masked(), config=make_config(stage=1))
    train_engine(engine, steps=2)


def ending_early(rank: int) -> None:
    """The reference ends after two of the three steps."""
    is_first = os.environ["DSLAUNCH_NUMERICS"].startswith("configured")
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(stage=1))
    train_engine(engine, steps=3 if is_first else 2)


def with_stale_mean(rank: int) -> None:
    """As configured, rank 1 forgets the mean of a normalization, which no training uses, after each step."""
    is_first = os.environ["DSLAUNCH_NUMERICS"].startswith("configured")
    model = torch.nn.Sequential(make_model(), torch.nn.Unflatten(1, (1, -1)), torch.nn.BatchNorm1d(1))
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=2))
    for step in range(3):
        train_engine(engine, steps=1, first=step)
        if is_first and rank == 1:
            model[2].reset_running_stats()


class WithTeacher(torch.nn.Module):
    """A model beside its moving average, which is frozen, and a buffer that no checkpoint keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = make_model(), make_model(seed=3).requires_grad_(False)
        self.register_buffer("positions", torch.ones(7), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.student(inputs)
        return result


def teaching(rank: int, wrong: str) -> None:
    """As configured the average, or a position, is `wrong` in the second step; no loss shows either."""
    is_first = os.environ["DSLAUNCH_NUMERICS"].startswith("configured")
    model = WithTeacher()
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=3))
    for step in range(3):
        params = [*model.student.parameters(), *model.teacher.parameters()]
        with dslaunch.zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
            for own, average in zip(model.student.parameters(), model.teacher.parameters(), strict=True):
                average.lerp_(own, 0.5)
            if is_first and step == 1 and rank == 0 and wrong == "average":
                model.teacher.last.bias[0] += 0.01
        if is_first and step == 1 and wrong == "position":
            model.positions[2] = 2.0
        train_engine(engine, steps=1, first=step)


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": 3},
        {
            "stage": 2,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.1,
            "bf16": {"enabled": True},
        },
    ],
)
def test_a_sound_training_equals_plain_torch(ranks: Ranks, tmp_path: Path, changes: dict[str, Any]) -> None:
    dtype = "bfloat16" if "bf16" in changes else "float32"
    result = compared(ranks, training, changes, dtype, folder=tmp_path)
    assert result.difference is None
    assert (result.num_steps, result.num_parameters) == (3, 18)
    assert max(result.largest.values()) < 0.5  # of the bounds


def test_rounding_does_not_grow_from_step_to_step(ranks: Ranks, tmp_path: Path) -> None:
    result = compared(ranks, growing, folder=tmp_path)
    assert result.difference is None
    assert max(result.largest.values()) < 0.5


def test_a_fault_is_named_by_step_quantity_and_parameter(ranks: Ranks, tmp_path: Path) -> None:
    result = compared(ranks, doubled, {"stage": 1, "optimizer": SGD}, folder=tmp_path)
    found = result.difference
    assert found is not None
    assert (found.step, found.quantity, found.name) == (1, "parameter", "first.weight")
    *_, hint, verdict = lines_of(result, "plain")
    assert hint == "the whole change is 2 times that of the other"
    assert verdict == "differs: step 1: parameter 'first.weight'"


def test_random_numbers_of_numpy_and_python_are_the_same_in_both_runs(ranks: Ranks, tmp_path: Path) -> None:
    result = compared(ranks, masked, folder=tmp_path)
    assert result.difference is None
    assert result.notes["are_drawn"]


def test_a_run_that_ends_before_the_other_differs(ranks: Ranks, tmp_path: Path) -> None:
    found = compared(ranks, ending_early, folder=tmp_path).difference
    assert found is not None
    assert (found.step, found.quantity, found.configured, found.reference) == (3, "number of steps", 3, 2)


def test_a_buffer_that_differs_on_one_rank_is_named(ranks: Ranks, tmp_path: Path) -> None:
    found = compared(ranks, with_stale_mean, folder=tmp_path).difference
    assert found is not None
    assert (found.step, found.quantity, found.name) == (2, "buffer", "2.running_mean")
    assert found.where.startswith("rank 1:")


@pytest.mark.parametrize(
    ("wrong", "quantity", "name"),
    [
        ("nothing", "", ""),
        ("average", "frozen parameter", "teacher.last.bias"),
        ("position", "buffer", "positions"),
    ],
)
def test_what_is_not_trained_is_compared_where_the_program_writes_to_it(
    ranks: Ranks, tmp_path: Path, wrong: str, quantity: str, name: str
) -> None:
    found = compared(ranks, teaching, wrong, folder=tmp_path).difference
    assert found is None or (found.step, found.quantity, found.name) == (2, quantity, name)
    assert (found is None) == (wrong == "nothing")


def test_stage_0_is_a_reference_where_the_model_fits_no_rank(ranks: Ranks, tmp_path: Path) -> None:
    result = compared(ranks, training, {"stage": 3}, folder=tmp_path, reference="stage0")
    assert result.difference is None
    assert set(result.largest.values()) == {0.0}  # stages have the same bits


def test_values_that_are_rounded_at_random_are_compared_with_stage_0(ranks: Ranks, tmp_path: Path) -> None:
    kept = {"master_dtype": "bf16", "optimizer_state_dtype": "8bit"}
    changes = {"stage": 3, "bf16": {"enabled": True}, "data_types": kept}
    result = compared(ranks, training, changes, "bfloat16", folder=tmp_path / "0", reference="stage0")
    assert result.difference is None
    assert set(result.largest.values()) == {0.0}
    with pytest.raises(RankFailed, match="in fewer bits than float32, rounded at random, and plain torch"):
        compared(ranks, training, changes, "bfloat16", folder=tmp_path / "plain")
