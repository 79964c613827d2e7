"""Steps that are far out: the last micro batch is run again, and a rank that computed wrong is named."""

from __future__ import annotations

import logging
import random
import re
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.errors import WrongNumbersError
from tests.runtime.models import make_config
from tests.runtime.ranks import Ranks

NUM_STEPS = 24


class Model(nn.Module):
    """It has a buffer that each forward changes, and dropout. A rank of `faulty` computes wrong in its next
    forward: once, in each, or another thing each time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)
        self.fault = ""
        self.num_wrong = 0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(inputs)).relu(), 0.5)
        if self.fault:
            self.num_wrong += 1
            hidden = hidden * {"once": 1e4, "never": 1e4}.get(self.fault, 1e4 * self.num_wrong)
            self.fault = "" if self.fault == "once" else self.fault
        return self.last(hidden)


def _train(rank: int, faults: dict[int, str], factor: float, stage: int) -> dict[str, Any]:
    """What is said of the last step, whose samples are so many times as large; `faults` by rank."""
    torch.manual_seed(0)
    config = make_config(stage=stage, reduce_bucket_size=50, rerun_outliers=10)
    engine, *_ = dslaunch.initialize(model=(model := Model()), config=config)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dslaunch").addHandler(handler)
    torch.manual_seed(rank)
    before: Any = None
    error = ""
    try:
        for step in range(NUM_STEPS + 1):
            inputs = torch.randn(4, 8)
            if step == NUM_STEPS:
                model.fault = faults.get(rank, "")
                inputs *= factor
            before = torch.get_rng_state(), {name: one.clone() for name, one in model.named_buffers()}
            run = engine.module if factor == 9.0 and rank == 1 else engine
            loss = (run(inputs) * (factor if step == NUM_STEPS else 1)).pow(2).mean()
            after = torch.get_rng_state(), {name: one.clone() for name, one in model.named_buffers()}
            engine.backward(loss)
            engine.step()
            assert torch.equal(torch.get_rng_state(), after[0])
            assert all(torch.equal(one, after[1][name]) for name, one in model.named_buffers())
    except WrongNumbersError as caught:
        error = str(caught)
    finally:
        logging.getLogger("dslaunch").removeHandler(handler)
    assert before is not None
    return {"said": [one for one in said if "norm" in one], "error": error, "steps": engine.global_steps}


def test_a_rank_that_computed_wrong_is_named_on_all_and_the_step_is_not_taken(ranks: Ranks) -> None:
    results = ranks(_train, {1: "once"}, 1.0, 3, world_size=3)
    errors = {one["error"] for one in results}
    assert len(errors) == 1
    (error,) = errors
    assert error.startswith(f"step {NUM_STEPS + 1}: the gradients' norm is ")
    assert "; rank 1 on " in error
    assert "computed something wrong: run again, twice" in error
    assert {one["steps"] for one in results} == {NUM_STEPS}


def test_where_a_rank_has_nothing_to_run_again_none_does(ranks: Ranks) -> None:
    """At stage 3 the others would wait for its gathers."""
    results = ranks(_train, {0: "never", 1: "never"}, 9.0, 3, world_size=2)
    assert {one["steps"] for one in results} == {NUM_STEPS + 1}
    assert "not looked at again: rank 1 ran no forward through the engine" in results[0]["said"][0]


def test_where_all_get_the_same_bits_it_is_the_data(ranks: Ranks) -> None:
    results = ranks(_train, {}, 1000.0, 2, world_size=2)
    assert [one["error"] for one in results] == ["", ""]
    (said,) = results[0]["said"]
    assert "with the same bits: it is the data or the training, and no host" in said
    assert results[1]["said"] == []
    assert {one["steps"] for one in results} == {NUM_STEPS + 1}


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        ({1: "varying"}, "rank 1 on .* got three different results"),
        ({0: "once", 1: "once"}, "cannot be repeated on ranks 0-1: run again, it gave other bits"),
    ],
)
def test_what_does_not_repeat_ends_nothing(ranks: Ranks, faults: dict[int, str], text: str) -> None:
    results = ranks(_train, faults, 1.0, 1, world_size=3)
    assert {one["error"] for one in results} == {""}
    assert re.search(text, results[0]["said"][0])


class Odd(nn.Module):
    """Do on rank 1, in each forward or in the last one, what a program may do: `kind` says what."""

    def __init__(self, kind: str, rank: int) -> None:
        super().__init__()
        self.last = nn.Linear(8, 1)
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.kind, self.is_odd, self.num_runs = kind, rank == 1, 0

    def forward(self, inputs: Tensor) -> Any:
        self.num_runs += 1
        factor = 1.0
        if self.is_odd and self.kind == "draws":
            factor = 1.0 + random.random() + float(numpy.random.rand())
        elif self.is_odd and self.kind == "buffers":
            self.written += 1.0
            self.replaced = self.replaced + 1.0
            factor = float(self.written + self.replaced)
        elif self.is_odd and self.kind == "inputs" and self.num_runs == NUM_STEPS + 1:
            inputs.mul_(2.0)
        elif self.is_odd and self.kind == "rounds" and self.num_runs == NUM_STEPS + 1:
            factor = 1.0 + 1e-6
        out = self.last(inputs) * factor
        return SimpleNamespace(out=out) if self.kind == "no tensors" else out


def _train_oddly(rank: int, kind: str) -> tuple[list[str], str]:
    """What is said of the last step, whose samples are large, and the error."""
    torch.manual_seed(0)
    model = Odd(kind, rank)
    config = make_config(stage=3, reduce_bucket_size=50, rerun_outliers=10)
    engine, *_ = dslaunch.initialize(model=model, config=config)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dslaunch").addHandler(handler)
    random.seed(rank)
    numpy.random.seed(rank)
    try:
        for step in range(NUM_STEPS + 1):
            inputs = torch.randn(4, 8) * (1.0 if step < NUM_STEPS else 1e4)
            output = engine(inputs)
            engine.backward(getattr(output, "out", output).pow(2).mean())
            engine.step()
    except WrongNumbersError as caught:
        return said, str(caught)
    finally:
        logging.getLogger("dslaunch").removeHandler(handler)
    assert (
        float(model.written) == float(model.replaced) == (NUM_STEPS + 1) * (kind == "buffers" and rank == 1)
    )
    return [one for one in said if "norm" in one], ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("draws", "with the same bits: it is the data"),
        ("buffers", "with the same bits: it is the data"),
        ("inputs", "not looked at again: rank 1 wrote to the inputs"),
        ("rounds", "rank 1 on .* got other bits .* which differ by rounding only"),
        ("no tensors", "not looked at again: ranks 0-2 got no tensors from the forward"),
    ],
)
def test_a_host_is_not_accused_of_what_a_program_does(ranks: Ranks, kind: str, text: str) -> None:
    results = ranks(_train_oddly, kind, world_size=3)
    assert {error for _, error in results} == {""}
    assert re.search(text, results[0][0][-1]), results[0]
