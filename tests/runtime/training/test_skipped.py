"""Steps that are skipped are told: which, where, whose, and when there are too many of them."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch.runtime.errors import SkippedStepsError
from tests.runtime.models import batch, loss_of, make_config, make_model, snapshot
from tests.runtime.ranks import Ranks

BAD = float("nan")


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())

    def __enter__(self) -> Lines:
        logging.getLogger("dslaunch").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("dslaunch").removeHandler(self)


def _step(engine: dslaunch.Engine, *, factor: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
    own = batch(engine.global_steps).chunk(engine.world_size)[engine.global_rank].to(dtype)
    engine.backward(loss_of(engine, own) * factor)
    engine.step()


def _bad_gradient(rank: int, stage: int, changes: dict[str, Any]) -> list[str]:
    """Rank 1's gradient of one parameter of the second block is NaN in two steps,
    then its loss is; then all is well, and then its gradient is NaN again.
    """
    model = make_model()
    engine, *_ = dslaunch.initialize(
        model=model, config=make_config(stage=stage, reduce_bucket_size=50, **changes)
    )
    poisoned = dict(model.named_parameters())["blocks.1.0.bias"]
    with Lines() as lines:
        _step(engine)
        hook = poisoned.register_hook(lambda grad: grad * (BAD if rank == 1 else 1.0))
        _step(engine)
        _step(engine)
        hook.remove()
        _step(engine, factor=BAD if rank == 1 else 1.0)
        _step(engine)
        poisoned.register_hook(lambda grad: grad * (BAD if rank == 1 else 1.0))
        _step(engine)  # whose losses are finite, whatever those of earlier steps were
    assert engine.skipped_steps == 4
    return lines.found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_skipped_step_says_where_and_whose_the_gradient_was(ranks: Ranks, stage: int) -> None:
    first, others = ranks(_bad_gradient, stage, {}, world_size=2)
    assert others == []  # one rank is enough
    assert [line.split(":")[0] for line in first] == [f"step {step} is skipped" for step in (2, 3, 4, 6)]
    for line in (*first[:2], first[3]):
        assert re.search(r"first in unit 'blocks\.1\.0[^']*' \(parameter 'blocks\.1\.0\.bias'\)", line), line
    assert all("every rank's loss was finite" in line for line in (first[0], first[3]))
    assert "those of rank 1 were so before the average" in first[1]
    assert "the loss of rank 1 was not finite" in first[2]
    assert all("loss scale 1" in line for line in first)


def _all_bad(rank: int, steps: int, changes: dict[str, Any], is_lenient: bool) -> tuple[list[str], str, int]:
    model = make_model()
    engine, *_ = dslaunch.initialize(model=model, config=make_config(**changes), is_lenient=is_lenient)
    message = ""
    with Lines() as lines:
        for _ in range(steps):
            try:
                _step(engine, factor=BAD)
            except SkippedStepsError as error:
                message = str(error)
                break
    return lines.found, message, engine.global_steps


def test_too_many_skipped_steps_in_a_row_are_an_error_on_all_ranks(ranks: Ranks) -> None:
    for rank, (lines, message, steps) in enumerate(
        ranks(_all_bad, 5, {"max_skipped_steps": 3}, False, world_size=2)
    ):
        assert message.startswith("3 steps in a row were skipped")
        assert "max_skipped_steps" in message
        assert (steps, len(lines)) == (3, 0 if rank else 3)


def test_many_skipped_steps_are_summed_up_and_a_hundred_of_them_are_an_error(ranks: Ranks) -> None:
    (lines, message, steps), *_ = ranks(_all_bad, 150, {}, False, world_size=1)
    assert message.startswith("100 steps in a row were skipped")
    assert steps == 100
    assert len(lines) == 11
    assert lines[-1].startswith("100 of the last 100 steps had gradients that are infinite or NaN")


def test_zero_is_any_number_of_skipped_steps(ranks: Ranks) -> None:
    (lines, message, steps), *_ = ranks(_all_bad, 105, {"max_skipped_steps": 0}, False, world_size=1)
    assert (message, steps) == ("", 105)
    told = [line for line in lines if line.startswith("step ")]
    assert len(told) == 15  # 10 of each hundred steps: 1 to 10, and 101 to 105


def test_programs_written_for_deepspeed_are_only_warned(ranks: Ranks) -> None:
    (lines, message, steps), *_ = ranks(_all_bad, 5, {"max_skipped_steps": 3}, True, world_size=1)
    assert (message, steps) == ("", 5)
    assert [line[:30] for line in lines if " in a row " in line] == ["3 steps in a row were skipped,"]


def _unchecked(rank: int, stage: int, check: bool) -> tuple[bool, list[str], dict[str, Tensor]]:
    model = make_model()
    bf16 = {"enabled": True, "check_grad_overflow": check}
    config = make_config(stage=stage, bf16=bf16, gradient_clipping=1.0, reduce_bucket_size=50)
    if not check:
        config["max_skipped_steps"] = 1  # a step that is applied is none
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine, *_ = dslaunch.initialize(model=model, config=config)
    dict(model.named_parameters())["blocks.1.0.bias"].register_hook(lambda grad: grad + float("inf"))
    with Lines() as lines:
        _step(engine, dtype=torch.bfloat16)
    return engine.was_step_applied(), lines.found, snapshot(model.named_parameters())


@pytest.mark.parametrize("stage", [0, 3])
def test_check_grad_overflow_decides_whether_bf16_skips_such_a_step(ranks: Ranks, stage: int) -> None:
    before = make_model().bfloat16().state_dict()
    applied, lines, params = ranks(_unchecked, stage, False, world_size=2)[0]
    assert applied
    assert "step 1 is applied, as bf16.check_grad_overflow is false" in lines[0]
    assert bool(torch.isinf(params["blocks.1.0.bias"]).all())
    assert bool(torch.isfinite(params["first.weight"]).all())  # nothing was clipped by an infinite norm
    assert not torch.equal(params["first.weight"], before["first.weight"])
    applied, _, params = ranks(_unchecked, stage, True, world_size=2)[0]
    assert not applied
    assert torch.equal(params["first.weight"], before["first.weight"])


# ---- gradients that are all zero


def _without_backward(rank: int) -> list[str]:
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(stage=2))
    with Lines() as lines:
        _step(engine)
        assert not lines.found
        engine.step()
        engine.step()
    assert engine.get_global_grad_norm() == 0.0
    return lines.found


def test_a_step_without_a_backward_is_told_of_once(ranks: Ranks) -> None:
    (line,), others = ranks(_without_backward, world_size=2)
    assert line.startswith("step 2: all gradients are zero on all ranks")
    assert others == []
