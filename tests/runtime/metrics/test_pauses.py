"""Saving, loading and evaluating, as engines tell them: states, and time that is no computing."""

from __future__ import annotations

import copy
import pickle
import sys
import time
from pathlib import Path

import torch

import dslaunch
from tests.runtime.metrics.test_step_metrics import Words
from tests.runtime.metrics.told import Reader, steps_of, telling, total
from tests.runtime.models import batch, loss_of, make_config, make_model
from tests.runtime.ranks import Ranks

STEPS = 4
NAP_S = 0.05


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
