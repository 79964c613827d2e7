"""What engines tell by themselves, compared with what the program has computed and where it was slow."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import time
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.comm import timed_steps
from dslaunch.runtime.pipeline.module import PipelineModule
from tests.exhaustive import few
from tests.runtime.metrics.told import Reader, telling
from tests.runtime.models import batch, loss_of, make_config, make_model
from tests.runtime.pipeline.models import data, loss_fn, specs
from tests.runtime.pipeline.test_train import MICRO, SIZE, config_of, pairs
from tests.runtime.ranks import Ranks

STEPS = 4
NAP_S = 0.05
SELDOM_STEPS, SELDOM_NAP_S, LONG_NAP_S = 100, 0.01, 0.4
PARTS = ("forward_s", "backward_s", "optimizer_s", "comm_s", "data_s", "paused_s")
Rows = list[dict[str, Any]]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    yield made
    made.close()


def total(rows: Rows, name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows)


def steps_of(rows: Rows) -> Rows:
    """The lines that end a step."""
    return [row for row in rows if "step" in row]


# ---- values


def _train(rank: int, path: str, stage: int, device: str) -> Rows:
    """Return what each step was, as the program knows it."""
    told = []
    with telling(rank, path):
        engine, *_ = dslaunch.initialize(
            model=make_model(),
            config=make_config(
                stage=stage,
                gradient_accumulation_steps=2,
                gradient_clipping=0.05,
                scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_type": "linear"}},
            ),
        )
        for number in range(STEPS):
            share = 0.0
            for micro in batch(number).chunk(2):
                loss = loss_of(engine, micro.chunk(engine.world_size)[rank].to(device))
                engine.backward(loss)
                engine.step()
                share += loss.item() / 2
            told.append(
                {
                    "step": number + 1,
                    "samples": 12 * (number + 1),
                    "skipped": 0,
                    "loss": share,
                    "lr": engine.get_lr()[0],
                    "grad_norm": engine.get_global_grad_norm(),
                }
            )
        engine.destroy()
    return told


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_step_tells_what_the_program_has_seen(ranks: Ranks, reader: Reader, stage: int) -> None:
    began = time.perf_counter()
    wanted = ranks(_train, str(reader.path), stage, "cpu", world_size=2)
    took_s = time.perf_counter() - began
    for rank, rows in reader.lines().items():
        rows = steps_of(rows)
        assert [{name: row[name] for name in wanted[rank][0]} for row in rows] == wanted[rank]
        assert "tokens" not in rows[0]
        assert "loss_scale" not in rows[0]
        assert total(rows, "steps") == STEPS
        for row in rows:
            assert sum(row.get(name, 0.0) for name in PARTS) == pytest.approx(row["step_s"], abs=1e-9)
            assert min(row[name] for name in ("forward_s", "backward_s", "optimizer_s", "comm_s")) > 0.0
        assert total(rows, "step_s") < took_s
        memory = rows[0]
        kinds = [memory[f"mem_{kind}"] for kind in ("parameters", "gradients", "optimizer", "other")]
        assert min(kinds[:3]) > 0
        assert sum(kinds) == memory["mem_used"] <= memory["mem_peak"] < memory["mem_total"]


def test_on_a_gpu_values_come_as_they_are_there(cuda_ranks: Ranks, reader: Reader) -> None:
    """Nothing takes time on the fake device, whose side streams work as late as they may."""
    wanted = cuda_ranks(_train, str(reader.path), 3, "cuda", world_size=2)
    found = reader.lines()
    assert len(found) == 2
    for rank, rows in found.items():
        by_step = {row["step"]: row for row in steps_of(rows)}
        assert by_step.keys() >= {STEPS}
        for step, row in by_step.items():
            told = {name: row[name] for name in wanted[rank][0]}
            assert told == pytest.approx(wanted[rank][step - 1], rel=1e-6)  # the loss is added up in float32
        assert 1 <= total(rows, "steps") <= STEPS
        memory = next(row for row in rows if "mem_used" in row)
        assert 0 < memory["mem_parameters"] < memory["mem_used"] <= memory["mem_peak"] <= memory["mem_total"]


def _waits(rank: int, path: str) -> tuple[dict[str, int], list[float]]:
    """What the host waited for in the third step and the fourth; and all losses."""
    from tests.fake_cuda.torch_cuda import device

    with telling(rank, path):
        engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(stage=3))
        own, losses = batch(0).chunk(engine.world_size)[rank].to(engine.device), []
        for number in range(STEPS):
            if number == 2:
                torch.cuda.synchronize()
                device().clear_counters()
            loss = loss_of(engine, own)
            engine.backward(loss)
            dslaunch.report(twice=loss * 2)
            engine.step()
            losses.append(loss)
        found: dict[str, int] = device().host_waits()
        engine.destroy()
        return found, [loss.item() for loss in losses]


def test_a_gpu_is_waited_for_once_a_step_for_the_norm(cuda_ranks: Ranks, reader: Reader) -> None:
    found = cuda_ranks(_waits, str(reader.path), world_size=2)
    assert [waits for waits, _ in found] == [{"copy to the host": 2}] * 2
    for rank, rows in reader.lines().items():
        told = [row["twice"] / 2 for row in rows if "twice" in row]
        assert told
        assert set(told) <= set(found[rank][1])


class Words(nn.Module):
    """Tokens in, a number out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 8)

    def forward(self, mask: Tensor, *, input_ids: Tensor) -> Tensor:
        found: Tensor = (self.embed(input_ids) * mask[..., None]).mean()
        return found


def _read_words(rank: int, path: str) -> None:
    with telling(rank, path):
        engine, *_ = dslaunch.initialize(model=make_model(Words), config=make_config(train_batch_size=8))
        for length in (5, 7):
            words = torch.ones(4, length, dtype=torch.int64)
            with torch.no_grad():
                engine(words, input_ids=words)
            engine.backward(engine(words, input_ids=words))
            engine.step()


def test_tokens_of_the_job_are_counted(ranks: Ranks, reader: Reader) -> None:
    ranks(_read_words, str(reader.path), world_size=2)
    for rows in reader.lines().values():
        assert [row["tokens"] for row in steps_of(rows)] == [2 * 4 * 5, 2 * 4 * 12]


class PicturesThenWords(Words):
    """Takes either."""

    def forward(self, given: Tensor) -> Tensor:  # type: ignore[override]
        found: Tensor = (
            given.mean() * self.embed.weight.mean() if given.is_floating_point() else self.embed(given)
        )
        return found.mean()


def _read_words_late(rank: int, path: str) -> None:
    timed_steps.STEP_S = 1e3  # few steps are timed
    with telling(rank, path, interval_s=0.05):
        engine, *_ = dslaunch.initialize(
            model=make_model(PicturesThenWords), config=make_config(train_batch_size=8)
        )
        for number in range(80):
            given = torch.ones(4, 5, dtype=torch.int64 if number >= 40 else torch.float32)
            engine.backward(engine(given))
            engine.step()


def test_tokens_that_begin_late_are_all_counted(ranks: Ranks, reader: Reader) -> None:
    ranks(_read_words_late, str(reader.path), world_size=2)
    for rows in reader.lines().values():
        assert steps_of(rows)[-1]["tokens"] == 40 * 2 * 4 * 5


def _report_while_a_step_ends(rank: int, path: str) -> None:
    """As a handler of a signal may."""
    with telling(rank, path):
        engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(stage=2))
        phases = engine._wire.recorder.phases
        end_step = phases.end_step

        def end_step_late(next_step: int) -> None:
            dslaunch.report(seen=next_step)
            end_step(next_step)

        phases.end_step = end_step_late
        for number in range(STEPS):
            engine.backward(loss_of(engine, batch(number).chunk(engine.world_size)[rank]))
            engine.step()
        engine.destroy()


def test_what_is_reported_while_a_step_ends_loses_none(ranks: Ranks, reader: Reader) -> None:
    ranks(_report_while_a_step_ends, str(reader.path), world_size=2)
    for rows in reader.lines().values():
        assert total(rows, "steps") == STEPS
        assert steps_of(rows)[-1]["step"] == STEPS
        assert [row["seen"] for row in rows if "seen" in row] == [2, 3, 4, 5]


def _overflow(rank: int, path: str) -> list[tuple[float, float]]:
    found = []
    with telling(rank, path):
        fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(stage=2, fp16=fp16))
        for number in range(STEPS):
            own = batch(number).chunk(engine.world_size)[rank].half()
            loss = loss_of(engine, own)
            engine.backward(loss * float("inf") if number == 1 else loss)
            engine.step()
            norm = engine.get_global_grad_norm()
            found.append((engine.optimizer.cur_scale, 0.0 if norm is None else norm))
        engine.destroy()
    return found


def test_skipped_steps_are_seen(ranks: Ranks, reader: Reader) -> None:
    wanted = ranks(_overflow, str(reader.path), world_size=2)
    for rank, rows in reader.lines().items():
        rows = steps_of(rows)
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        assert [row["skipped"] for row in rows] == [0, 1, 1, 1]
        assert (
            [row["loss_scale"] for row in rows]
            == [scale for scale, _ in wanted[rank]]
            == [256.0] + [128.0] * 3
        )
        assert [isfinite(row["grad_norm"]) for row in rows] == [True, False, True, True]


# ---- times


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
    few(
        [
            (where, name, stage)
            for where, name in (
                ("data", "data_s"),
                ("forward", "forward_s"),
                ("loss", "forward_s"),
                ("backward", "backward_s"),
            )
            for stage in (0, 2, 3)
        ],
        lambda where, name, stage: (where, stage) in {("data", 3), ("forward", 0), ("backward", 2)},
    ),
)
def test_a_slow_place_is_in_its_phase_and_others_wait(
    ranks: Ranks, reader: Reader, where: str, name: str, stage: int
) -> None:
    ranks(_nap, str(reader.path), stage, where, world_size=2)
    found = reader.lines()
    assert total(found[1], name) > NAP_S * (2 * STEPS - 1)  # before the first forward nothing is counted
    check_wait(found[1], found[0], name, NAP_S * 2)


def _seldom_timed(rank: int, path: str) -> tuple[list[float], list[float], float, int]:
    """Rank 1 is slow with its data, and once very slow, in a step that is not timed. Return when the steps
    ended, how long each waited for its data, the last loss, and how many were timed.
    """
    timed_steps.STEP_S = 1e3  # so dear that one is timed for each line
    with telling(rank, path, interval_s=0.25):
        torch.manual_seed(0)
        config = make_config(stage=3, train_batch_size=8, gradient_accumulation_steps=2)
        engine, *_ = dslaunch.initialize(model=Slow(0.0), config=config)
        ends: list[float] = []
        waits: list[float] = []
        num_timed, ended, is_well = 0, time.perf_counter(), True
        for _ in range(SELDOM_STEPS):
            num_timed += engine._wire.recorder.phases.is_timed
            waited_s = 0.0
            for number in range(2):
                time.sleep(SELDOM_NAP_S if rank == 1 else 0.0)
                is_late = rank == number == 1 and len(ends) > SELDOM_STEPS / 2
                if is_well and is_late and not engine._wire.recorder.phases.is_timed:
                    is_well = False
                    time.sleep(LONG_NAP_S)
                waited_s += time.perf_counter() - ended
                loss = engine(torch.ones(2, 16))
                engine.backward(loss)
                engine.step()
                ended = time.perf_counter()
            ends.append(ended)
            waits.append(waited_s)
        engine.destroy()
    return ends, waits, loss.item(), num_timed


def test_where_few_steps_are_timed_the_others_are_counted_and_taken_to_be_like_them(
    ranks: Ranks, reader: Reader
) -> None:
    found = ranks(_seldom_timed, str(reader.path), world_size=2)
    lines = reader.lines()
    means: dict[int, dict[str, float]] = {}
    for rank, (ends, waits, loss, num_timed) in enumerate(found):
        rows = [row for row in lines[rank] if "steps" in row]
        assert num_timed < SELDOM_STEPS / 2
        assert total(rows, "steps") == SELDOM_STEPS
        assert (rows[-1]["step"], rows[-1]["loss"]) == (SELDOM_STEPS, loss)
        first, *rest = rows  # all of these are timed
        num_steps = total(rest, "steps")
        assert num_steps > SELDOM_STEPS / 2
        assert num_timed > first["steps"] + 1  # what comes next is timed, too
        assert total(rest, "step_s") == pytest.approx(ends[-1] - ends[first["steps"] - 1], abs=0.1)
        # Of all steps; on a busy machine something passes in a call before it says that it has begun.
        assert total(rest, "data_s") == pytest.approx(sum(waits[first["steps"] :]), abs=LONG_NAP_S / 2)
        for row in rows:
            assert sum(row.get(name, 0.0) for name in PARTS) <= row["step_s"] + 1e-9
        means[rank] = {name: total(rest, name) / num_steps for name in (*PARTS, "step_s")}
        known_s = sum(means[rank][name] for name in PARTS)
        assert known_s + (LONG_NAP_S / num_steps if rank == 0 else 0.0) > 0.6 * means[rank]["step_s"]
    assert means[1]["data_s"] - means[0]["data_s"] > SELDOM_NAP_S / 2
    assert means[0]["comm_s"] - means[1]["comm_s"] > SELDOM_NAP_S / 2


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
    assert total(found[rank], f"{where}_s") > NAP_S * MICRO * STEPS
    check_wait(found[rank], found[1 - rank], f"{where}_s", NAP_S * MICRO)
    for own, rows in found.items():
        rows = steps_of(rows)
        assert [row["loss"] for row in rows] == losses[own]
        assert total(rows, "steps") == STEPS
        for row in rows:
            assert sum(row.get(name, 0.0) for name in PARTS) == pytest.approx(row["step_s"], abs=1e-9)
    assert [row["tokens"] for row in steps_of(found[0])] == [SIZE * MICRO * 5 * (n + 1) for n in range(STEPS)]


# ---- what is no training


def _other_work(rank: int, path: str, folder: str) -> float:
    with telling(rank, path):
        engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(stage=3))
        own = batch(0).chunk(engine.world_size)[rank]

        def step() -> None:
            engine.backward(loss_of(engine, own))
            engine.step()

        step()
        dslaunch.report(accuracy=0.25, step=700, loss=7.0)
        began = time.perf_counter()
        engine.save_checkpoint(folder)
        engine.eval()
        with torch.no_grad():
            for _ in range(3):
                loss_of(engine, own)
                time.sleep(NAP_S)
        engine.train()
        engine.load_checkpoint(folder)
        took_s = time.perf_counter() - began
        step()
        engine.destroy()
    return took_s


def test_saving_loading_and_evaluating_are_states_and_no_computing(
    ranks: Ranks, reader: Reader, tmp_path: Path
) -> None:
    took_s = ranks(_other_work, str(reader.path), str(tmp_path / "checkpoint"), world_size=2)
    found = reader.lines()
    for rank, rows in found.items():
        states = [row["state"] for row in rows if "state" in row]
        assert list(dict.fromkeys(states)) == ["saving", "evaluating", "loading"]
        _, last = (row for row in rows if "steps" in row)
        assert "state" not in last
        assert 0.9 * took_s[rank] < last["paused_s"] < took_s[rank] + NAP_S
        assert last.get("data_s", 0.0) + last["forward_s"] < last["paused_s"]  # three naps at least
        # What the program says of the loss counts from then on; the step is the engine's.
        assert [row["loss"] for row in rows if "loss" in row][1:] == [7.0]
        assert [row["step"] for row in rows if "step" in row] == [1, 2]
        assert [row["accuracy"] for row in rows if "accuracy" in row] == [0.25]


def _learn_from_a_teacher(rank: int, path: str, interval_s: float) -> None:
    with telling(rank, path, interval_s=interval_s):
        student, teacher = (
            dslaunch.initialize(model=make_model(seed=seed), config=make_config(stage=2))[0]
            for seed in (1, 2)
        )
        teacher.eval()
        own = batch(0).chunk(student.world_size)[rank]
        for _ in range(STEPS):
            time.sleep(2 * interval_s)  # so a line is due
            with torch.no_grad():
                loss_of(teacher, own)
            student.backward(loss_of(student, own))
            student.step()
        for engine in (student, teacher):
            engine.destroy()


def test_a_rank_whose_other_engine_has_evaluated_trains_again(ranks: Ranks, reader: Reader) -> None:
    ranks(_learn_from_a_teacher, str(reader.path), 0.0, world_size=2)
    for rows in reader.lines().values():
        assert "evaluating" in [row.get("state") for row in rows]
        assert [row.get("state") for row in steps_of(rows)] == [None] * STEPS
        assert all(row["paused_s"] > 0.0 for row in steps_of(rows)[1:])


def test_what_is_told_when_a_teacher_begins_is_of_training(ranks: Ranks, reader: Reader) -> None:
    ranks(_learn_from_a_teacher, str(reader.path), NAP_S, world_size=2)
    for rows in reader.lines().values():
        assert total(rows, "steps") == STEPS
        assert [row.get("state") for row in rows if "steps" in row] == [None] * len(steps_of(rows))
        assert total(rows, "data_s") > 2 * NAP_S * (STEPS - 1) > total(rows, "paused_s")


class Pretrained(Words):
    """As a model of transformers, of which Trainer evaluates the module itself."""

    __module__ = "transformers.models.words"


def _evaluate_past_the_engine(rank: int, path: str) -> None:
    with telling(rank, path):
        model = make_model(Pretrained)
        engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=2, train_batch_size=8))
        words = torch.ones(4, 5, dtype=torch.int64)
        copied = copy.deepcopy(model)  # its hook is picklable, too
        pickle.dumps(list(copied._forward_pre_hooks.values()))
        for _ in range(2):
            engine.backward(engine(words, input_ids=words))
            engine.step()
            model.eval()
            with torch.no_grad():
                model(words, input_ids=words)
            time.sleep(4 * NAP_S)
            model.train()
        engine.destroy()
        assert not model._forward_pre_hooks


def test_an_evaluation_of_a_model_of_transformers_need_not_go_through_the_engine(
    ranks: Ranks, reader: Reader
) -> None:
    ranks(_evaluate_past_the_engine, str(reader.path), world_size=2)
    for rows in reader.lines().values():
        second = steps_of(rows)[1]
        assert second["paused_s"] > 4 * NAP_S > second.get("data_s", 0.0)
        assert "evaluating" in [row.get("state") for row in rows]


class SlowFinder:
    """Saving and loading are imported anew, slowly."""

    NAMES = ("dslaunch.runtime.checkpoint.save", "dslaunch.runtime.checkpoint.load")

    def __init__(self) -> None:
        for name in self.NAMES:
            sys.modules.pop(name, None)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in self.NAMES:
            time.sleep(4 * NAP_S)


def _import_slowly(rank: int, path: str, folder: str) -> None:
    with telling(rank, path):
        engine, *_ = dslaunch.initialize(model=make_model(), config=make_config())
        own, finder = batch(0).chunk(engine.world_size)[rank], SlowFinder()
        sys.meta_path.insert(0, finder)
        for use in (None, engine.save_checkpoint, engine.load_checkpoint):
            if use is not None:
                use(folder)
            engine.backward(loss_of(engine, own))
            engine.step()
        sys.meta_path.remove(finder)
        engine.destroy()


def test_the_first_save_and_the_first_load_hold_their_imports(
    ranks: Ranks, reader: Reader, tmp_path: Path
) -> None:
    ranks(_import_slowly, str(reader.path), str(tmp_path / "checkpoint"), world_size=2)
    for rows in reader.lines().values():
        for row in steps_of(rows)[1:]:
            assert row["paused_s"] > 4 * NAP_S > row["data_s"]


def _two_engines(rank: int, path: str) -> None:
    with telling(rank, path):
        engines = [
            dslaunch.initialize(model=make_model(seed=seed), config=make_config(stage=3))[0]
            for seed in (1, 2)
        ]
        for number in range(STEPS):
            for engine in engines:
                engine.backward(loss_of(engine, batch(number).chunk(engine.world_size)[rank]))
                engine.step()
        engines[0].destroy()
        engines[1].backward(loss_of(engines[1], batch(0).chunk(2)[rank]))
        engines[1].step()
        engines[1].destroy()


def test_of_two_engines_the_first_tells_and_the_time_is_that_of_both(ranks: Ranks, reader: Reader) -> None:
    ranks(_two_engines, str(reader.path), world_size=2)
    for rows in reader.lines().values():
        assert [row["step"] for row in steps_of(rows)] == [1, 2, 3, 4, 5]
        second = steps_of(rows)[1]
        parts = {name: second.get(name, 0.0) for name in PARTS}
        assert sum(parts.values()) == pytest.approx(second["step_s"], abs=1e-9)
        assert parts["data_s"] < second["step_s"] / 2  # the other one's step is none


def _next_engine(rank: int, path: str) -> None:
    with telling(rank, path):
        kept = []
        for seed in (1, 2):
            engine, *_ = dslaunch.initialize(model=make_model(seed=seed), config=make_config(stage=3))
            kept.append(engine)
            for number in range(seed + 1):
                engine.backward(loss_of(engine, batch(number).chunk(engine.world_size)[rank]))
                engine.step()
        for engine in kept:
            engine.destroy()


def test_an_engine_that_comes_after_another_one_tells_its_steps(ranks: Ranks, reader: Reader) -> None:
    ranks(_next_engine, str(reader.path), world_size=2)
    for rows in reader.lines().values():
        assert [row["step"] for row in steps_of(rows)] == [1, 2, 1, 2, 3]


def test_rank_0_tells_the_configuration_as_it_took_effect(
    ranks: Ranks, reader: Reader, tmp_path: Path
) -> None:
    ranks(_train, str(reader.path), 2, "cpu", world_size=2)
    found = reader.lines()
    assert [row["file"] for row in found[0] if "file" in row] == ["config"]
    assert not [row for row in found[1] if "file" in row]
    assert [path.name for path in tmp_path.glob("*.json")] == ["config-0.json"]
    told = json.loads((tmp_path / "config-0.json").read_text())
    assert told["zero"]["stage"] == 2
    assert told["ds_config"]["gradient_accumulation_steps"] == 2
    assert told["ds_config"]["train_micro_batch_size_per_gpu"] == 3
