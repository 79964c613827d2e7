"""Where the time of steps went, as engines tell it, compared with where the program was slow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.comm import phases
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.runtime.zero.gathered_parameters import GatheredParameters
from tests.runtime.metrics.told import PARTS, Reader, Rows, steps_of, telling, total
from tests.runtime.models import make_config
from tests.runtime.pipeline.models import data, loss_fn, specs
from tests.runtime.pipeline.test_train import MICRO, SIZE, config_of, pairs
from tests.runtime.ranks import Ranks

STEPS = 4
NAP_S = 0.05
SELDOM_STEPS, SELDOM_NAP_S, LONG_NAP_S = 60, 0.01, 0.4


class Slow(nn.Module):
    """Its forward takes a nap."""

    def __init__(self, nap_s: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.nap_s = nap_s

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        time.sleep(self.nap_s)
        return x.mean()


def _nap(rank: int, path: str, stage: int, where: str) -> None:
    """Rank 1 is slow in one place."""

    def nap(place: str) -> float:
        return NAP_S if rank == 1 and place == where else 0.0

    with telling(rank, path):
        torch.manual_seed(0)
        model = Slow(nap("forward"))
        config = make_config(stage=stage, train_batch_size=8, gradient_accumulation_steps=2)
        engine, *_ = dslaunch.initialize(model=model, config=config)
        if where == "backward":
            model.layers[1].register_full_backward_hook(lambda *_: time.sleep(nap("backward")))
        for _ in range(2 * STEPS):  # micro batches
            time.sleep(nap("data"))
            loss = engine(torch.ones(2, 16))
            time.sleep(nap("loss"))
            engine.backward(loss)
            engine.step()
        engine.destroy()


@pytest.mark.parametrize(
    ("where", "name", "stage"),
    [
        ("data", "data_s", 3),
        ("forward", "forward_s", 0),
        ("loss", "forward_s", 3),
        ("backward", "backward_s", 2),
    ],
)
def test_a_slow_place_is_in_its_phase_and_others_wait(
    ranks: Ranks, reader: Reader, where: str, name: str, stage: int
) -> None:
    ranks(_nap, str(reader.path), stage, where, world_size=2)
    found = reader.lines()
    assert total(found[1], name) > NAP_S * (2 * STEPS - 1)  # before the first forward nothing is counted
    check_wait(found[1], found[0], name, NAP_S * 2)


def _seldom_timed(rank: int, path: str) -> tuple[list[float], float, int]:
    """Rank 1 is slow with its data, and once very slow, in a step that is not timed. Return when the steps
    ended, the last loss, and how many were timed.
    """
    phases.SHORT_S = LONG_NAP_S / 2  # few are timed
    with telling(rank, path, interval_s=0.25):
        torch.manual_seed(0)
        config = make_config(stage=3, train_batch_size=8, gradient_accumulation_steps=2)
        engine, *_ = dslaunch.initialize(model=Slow(0.0), config=config)
        ends: list[float] = []
        num_timed, is_well = 0, True
        for _ in range(SELDOM_STEPS):
            num_timed += engine._wire.recorder.phases.is_timed
            for number in range(2):
                time.sleep(SELDOM_NAP_S if rank == 1 else 0.0)
                is_late = rank == number == 1 and len(ends) > SELDOM_STEPS / 2
                if is_well and is_late and not engine._wire.recorder.phases.is_timed:
                    is_well = False
                    time.sleep(LONG_NAP_S)
                loss = engine(torch.ones(2, 16))
                engine.backward(loss)
                engine.step()
            ends.append(time.perf_counter())
        engine.destroy()
    return ends, loss.item(), num_timed


def test_where_few_steps_are_timed_the_others_are_counted_and_taken_to_be_like_them(
    ranks: Ranks, reader: Reader
) -> None:
    found = ranks(_seldom_timed, str(reader.path), world_size=2)
    lines = reader.lines()
    means: dict[int, dict[str, float]] = {}
    for rank, (ends, loss, num_timed) in enumerate(found):
        rows = [row for row in lines[rank] if "steps" in row]
        assert num_timed < SELDOM_STEPS / 2
        assert total(rows, "steps") == SELDOM_STEPS
        assert (rows[-1]["step"], rows[-1]["loss"]) == (SELDOM_STEPS, loss)
        first, *rest = rows  # all of these are timed
        num_steps = total(rest, "steps")
        assert num_steps > SELDOM_STEPS / 2
        assert num_timed > first["steps"] + 1  # what comes next is timed, too
        assert total(rest, "step_s") == pytest.approx(ends[-1] - ends[first["steps"] - 1], abs=0.1)
        for row in rows:
            assert sum(row.get(name, 0.0) for name in PARTS) <= row["step_s"] + 1e-9
        means[rank] = {name: total(rest, name) / num_steps for name in (*PARTS, "step_s")}
        known_s = sum(means[rank][name] for name in PARTS)
        assert known_s + LONG_NAP_S / num_steps > 0.8 * means[rank]["step_s"]
    assert means[1]["data_s"] - means[0]["data_s"] > SELDOM_NAP_S / 2
    assert means[0]["comm_s"] - means[1]["comm_s"] > SELDOM_NAP_S / 2


def _gather_between(rank: int, path: str) -> int:
    """Rank 1 comes late to a gather between two steps. Return how many were timed."""
    phases.SHORT_S = 1e3
    num_timed = 0
    with telling(rank, path, interval_s=0.25):
        config = make_config(stage=3, train_batch_size=4)
        config["zero_optimization"]["reduce_bucket_size"] = 50
        engine, *_ = dslaunch.initialize(model=Slow(0.0), config=config)
        for _ in range(SELDOM_STEPS):
            num_timed += engine._wire.recorder.phases.is_timed
            engine.backward(engine(torch.ones(2, 16)))
            engine.step()
            time.sleep(SELDOM_NAP_S if rank == 1 else 0.0)
            with GatheredParameters(list(engine.module.parameters())):
                pass
        engine.destroy()
    return num_timed


def test_a_wait_between_two_steps_is_seen_where_few_are_timed(ranks: Ranks, reader: Reader) -> None:
    num_timed = ranks(_gather_between, str(reader.path), world_size=2)
    found = reader.lines()
    slept_s = (SELDOM_STEPS - 1) * SELDOM_NAP_S  # what follows the last step is part of none
    assert max(num_timed) < SELDOM_STEPS / 2
    assert total(found[1], "data_s") > 0.8 * slept_s
    assert total(found[1], "data_s") - total(found[0], "data_s") > slept_s / 2
    assert total(found[0], "comm_s") - total(found[1], "comm_s") > slept_s / 2


def check_wait(slow: Rows, waiting: Rows, name: str, slept_s: float) -> None:
    """In each step one rank has slept so long, and the other one was seen to wait for it. A busy machine may
    hold up either in some steps.
    """
    pairs_of_rows = list(zip(steps_of(slow)[1:], steps_of(waiting)[1:], strict=True))  # not what comes once
    least_slow, least = (min(row.get(name, 0.0) for row in rows) for rows in zip(*pairs_of_rows, strict=True))
    assert least_slow - least > slept_s / 2
    waits = [other.get("comm_s", 0.0) - own.get("comm_s", 0.0) for own, other in pairs_of_rows]
    assert max(waits) > slept_s / 2


def _stages(rank: int, path: str, where: str) -> list[float]:
    with telling(rank, path):
        torch.manual_seed(0)
        module = PipelineModule(specs(is_tied=False), 2, loss_fn=loss_fn, partition_method="uniform")
        engine, *_ = dslaunch.initialize(model=module, config=config_of(1))
        if rank == 1 and where == "forward":
            module.forward_funcs[-1].register_forward_pre_hook(lambda *_: time.sleep(NAP_S))
        losses = []
        for step in range(STEPS):
            source = pairs(*data(step, size=SIZE * MICRO), engine, MICRO)
            losses.append(
                engine.train_batch(_late(source) if where == "data" and rank == 0 else source).item()
            )
        engine.eval_batch(pairs(*data(0, size=SIZE * MICRO), engine, MICRO))
        engine.destroy()
    return losses


def _late(source: Iterator[Any]) -> Iterator[Any]:
    for one in source:
        time.sleep(NAP_S)
        yield one


@pytest.mark.parametrize(("where", "rank"), [("forward", 1), ("data", 0)])
def test_a_pipeline_tells_waits_between_stages(ranks: Ranks, reader: Reader, where: str, rank: int) -> None:
    losses = ranks(_stages, str(reader.path), where, world_size=2)
    found = reader.lines()
    assert total(found[rank], f"{where}_s") > 0.9 * NAP_S * MICRO * STEPS  # a busy machine: 0.77 of 0.8 s
    check_wait(found[rank], found[1 - rank], f"{where}_s", NAP_S * MICRO)
    for own, rows in found.items():
        rows = steps_of(rows)
        assert [row["loss"] for row in rows] == losses[own]
        assert total(rows, "steps") == STEPS
        for row in rows:
            assert sum(row.get(name, 0.0) for name in PARTS) == pytest.approx(row["step_s"], abs=1e-9)
    assert [row["tokens"] for row in steps_of(found[0])] == [SIZE * MICRO * 5 * (n + 1) for n in range(STEPS)]
