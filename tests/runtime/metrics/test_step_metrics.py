"""What engines tell by themselves of their steps, compared with what the program has computed."""

from __future__ import annotations

import json
import time
from math import isfinite
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.comm import phases
from tests.runtime.metrics.told import PARTS, Reader, Rows, steps_of, telling, total
from tests.runtime.models import batch, loss_of, make_config, make_model
from tests.runtime.ranks import Ranks

STEPS = 4
NAP_S = 0.05


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


@pytest.mark.parametrize("stage", [0, 3])
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
    phases.SHORT_S = 1e3  # few steps are timed
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
        times = engine._wire.recorder.phases
        end_step = times.end_step

        def end_step_late(next_step: int) -> None:
            dslaunch.report(seen=next_step)
            end_step(next_step)

        times.end_step = end_step_late
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
