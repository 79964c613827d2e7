"""The parts of a step that a training loop decides by itself: scaling, no_sync, batch sizes."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch.runtime.clock import Clock
from dslaunch.runtime.errors import ConfigError
from tests.runtime.models import (
    assert_same_bits,
    batch,
    loss_of,
    make_config,
    make_model,
    snapshot,
    train_engine,
    worst_difference,
)
from tests.runtime.ranks import Ranks

STEPS = 4
DRIFT = 1e-6  # as in test_stages.py


def _engine(**changes: Any) -> dslaunch.Engine:
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(**changes))
    return engine


def _train(rank: int, stage: int, how: str) -> dict[str, Tensor]:
    engine = _engine(stage=stage, gradient_accumulation_steps=2)
    for step in range(STEPS):
        first, second = (micro.chunk(engine.world_size)[rank] for micro in batch(step).chunk(2))
        if how == "scale":
            engine.scale(loss_of(engine, first)).backward()
            engine.step()
            engine.scale(loss_of(engine, second)).backward()
        elif how == "direct":  # the engine is not told of the backward
            loss_of(engine, first).backward()  # type: ignore[no-untyped-call]
            engine.step()
            loss_of(engine, second).backward()  # type: ignore[no-untyped-call]
        elif how == "no_sync":  # as accelerate does it: a boundary is what its user says
            engine.set_gradient_accumulation_boundary(True)
            with engine.no_sync():
                engine.backward(loss_of(engine, first))
            engine.backward(loss_of(engine, second))
        else:
            engine.backward(loss_of(engine, first))
            engine.step()
            engine.backward(loss_of(engine, second))
        engine.step()
    return snapshot(engine.module.named_parameters())


def _train_each_way(rank: int, stage: int) -> list[dict[str, Tensor]]:
    return [_train(rank, stage, how) for how in ("backward and step", "scale", "direct", "no_sync")]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_way_to_accumulate_gives_the_same_bits(ranks: Ranks, stage: int) -> None:
    for expected, *others in ranks(_train_each_way, stage, world_size=2):
        for found in others:
            assert_same_bits(found, expected)


def _gradients_by_hand(rank: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What autograd.grad() returns, what a backward through recomputation leaves,
    and what is right for a plain model.
    """
    engine = _engine(gradient_accumulation_steps=2)
    params = list(engine.module.parameters())
    own = batch(0)
    returned = torch.autograd.grad(loss_of(engine, own), params)
    x = own.clone().requires_grad_()  # which this kind of recomputation asks for
    torch.utils.checkpoint.checkpoint(engine, x, use_reentrant=True).pow(2).mean().backward()
    left = [dslaunch.zero.safe_get_full_grad(param) for param in params]
    plain = make_model()
    loss_of(plain, own).backward()  # type: ignore[no-untyped-call]
    right = [param.grad for param in plain.parameters() if param.grad is not None]
    return list(returned), [one for one in left if one is not None], right


def test_only_what_a_backward_adds_to_a_parameter_is_a_part_of_the_mean(ranks: Ranks) -> None:
    ((returned, left, right),) = ranks(_gradients_by_hand, world_size=1)
    assert len(returned) == len(left) == len(right) > 0
    for one, part, whole in zip(returned, left, right, strict=True):
        torch.testing.assert_close(one, whole)
        torch.testing.assert_close(part, whole / 2)


def _step_in_no_sync(rank: int) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    engine = _engine()
    before = snapshot(engine.module.named_parameters())
    with engine.no_sync():
        engine.backward(loss_of(engine, batch(0)))
        with engine.no_sync():
            pass
        with pytest.raises(ConfigError) as refused:
            engine.step()
    after = snapshot(engine.module.named_parameters())
    engine.step()  # outside it is allowed again
    return str(refused.value), before, after


def test_a_step_inside_no_sync_is_an_error_and_changes_nothing(ranks: Ranks) -> None:
    message, before, after = ranks(_step_in_no_sync, world_size=1)[0]
    assert message.startswith("engine.step() inside engine.no_sync()")
    assert_same_bits(before, after)


def _grow(rank: int, stage: int) -> tuple[dict[str, Tensor], tuple[int, int, int], int]:
    """Half of each batch at first, then all of it in two micro batches."""
    engine = _engine(stage=stage, train_batch_size=6)
    for step in range(STEPS):
        if step == 2:
            engine.set_train_batch_size(12)
        micros = batch(step).chunk(2)[: 2 if step >= 2 else 1]
        for micro in micros:
            engine.backward(loss_of(engine, micro.chunk(engine.world_size)[rank]))
            engine.step()
    sizes = (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    )
    return snapshot(engine.module.named_parameters()), sizes, engine.global_samples


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_a_batch_may_grow_by_more_micro_batches(ranks: Ranks, stage: int) -> None:
    expected = make_model()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(expected, batch(step)[: 12 if step >= 2 else 6]).backward()
        optimizer.step()
    for params, sizes, num_samples in ranks(_grow, stage, world_size=2):
        assert worst_difference(params, snapshot(expected.named_parameters())) <= DRIFT
        assert sizes == (12, 3, 2)
        assert num_samples == 6 + 6 + 12 + 12


NUMBERS = (2, 3, 1, 4)  # of micro batches, so the next step begins after 10, and a run that goes on takes 3


def _numbers(rank: int, stage: int, folder: str) -> tuple[dict[str, Tensor], list[int]]:
    def run(engine: dslaunch.Engine, step: int, num: int) -> None:
        for micro in batch(step, size=6 * num).chunk(num):
            counts.append(engine.global_steps)
            engine.backward(loss_of(engine, micro.chunk(engine.world_size)[rank]))
            engine.step()

    counts: list[int] = []
    engine = _engine(stage=stage, gradient_accumulation_steps=2)
    for step, num in enumerate(NUMBERS):
        engine.set_train_batch_size(6 * num)
        run(engine, step, num)
    engine.save_checkpoint(folder)
    other = _engine(stage=stage, train_batch_size=18, gradient_accumulation_steps=3)
    other.load_checkpoint(folder)
    run(other, len(NUMBERS), 3)
    return snapshot(other.module.named_parameters()), [*counts, other.global_steps]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_has_as_many_micro_batches_as_were_set_for_it_last(
    ranks: Ranks, stage: int, tmp_path: Path
) -> None:
    expected = make_model()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01, weight_decay=0.1)
    for step, num in enumerate((*NUMBERS, 3)):
        optimizer.zero_grad()
        loss_of(expected, batch(step, size=6 * num)).backward()
        optimizer.step()
    for params, counts in ranks(_numbers, stage, str(tmp_path), world_size=2):
        assert counts == [0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 4, 4, 4, 5]
        assert worst_difference(params, snapshot(expected.named_parameters())) <= DRIFT


def _sizes(rank: int) -> tuple[list[str], tuple[int, int, int]]:
    engine = _engine(gradient_accumulation_steps=2)  # 12 samples: 3 on each of 2 ranks, twice
    messages = []
    for wrong in (0, 5, 7, -6, "6"):
        with pytest.raises(ValueError, match="is not a multiple") as refused:
            engine.set_train_batch_size(wrong)  # type: ignore[arg-type]
        messages.append(str(refused.value))
    with pytest.raises(ValueError, match="not a positive number"):
        engine.set_train_micro_batch_size(0)
    engine.set_train_micro_batch_size(4)
    return messages, (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    )


@pytest.mark.slow
def test_sizes_that_do_not_fit_are_refused_and_a_micro_batch_may_grow(ranks: Ranks) -> None:
    for messages, sizes in ranks(_sizes, world_size=2):
        assert messages[1] == "train_batch_size 5 is not a multiple of 6: 3 samples on each of 2 ranks"
        assert sizes == (16, 4, 2)


def _getters(rank: int, stage: int) -> tuple[bool, bool, bool]:
    engine = _engine(stage=stage)
    return (
        engine.zero_optimization(),
        engine.zero_optimization_partition_gradients(),
        engine.zero_optimization_partition_weights(),
    )


@pytest.mark.parametrize(
    ("stage", "expected"), [(0, (False, False, False)), (1, (True, False, False)), (2, (True, True, False))]
)
def test_what_is_sharded_can_be_asked(ranks: Ranks, stage: int, expected: tuple[bool, bool, bool]) -> None:
    assert ranks(_getters, stage, world_size=1) == [expected]


def test_times_that_were_taken_are_not_counted_again() -> None:
    clock = Clock(is_on=True, device=torch.device("cpu"))
    for name in ("forward", "forward", "backward"):
        with clock.time(name):
            pass
    assert re.fullmatch(r"forward [0-9.]+ ms, backward [0-9.]+ ms", clock.take())
    assert clock.take() == ""


def _timed(rank: int, is_on: bool) -> str:
    config = make_config(wall_clock_breakdown=is_on, gradient_accumulation_steps=2)
    engine, *_ = dslaunch.initialize(model=make_model(), config=config)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train_engine(engine, steps=2)
    return said.getvalue()


def test_rank_0_says_what_the_parts_of_a_step_took(ranks: Ranks) -> None:
    first, second = ranks(_timed, True, world_size=2)
    lines = [re.sub(r"[0-9.]+ ms", "N ms", line) for line in first.splitlines()]
    assert lines == [f"step={step}, forward N ms, backward N ms, step N ms" for step in (1, 2)]
    assert all(float(found) > 0 for found in re.findall(r"([0-9.]+) ms", first))
    assert second == ""
    assert ranks(_timed, False, world_size=1) == [""]


class _Raises(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler of a program, with a fault in its second step."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch == 1:
            raise ArithmeticError("no such epoch")


def _trained_on(rank: int) -> tuple[tuple[int, int], dict[str, Tensor], dict[str, Tensor]]:
    """Training of three steps, with an error of the scheduler that the loop catches, and without."""
    found = []
    for kind in (_Raises, torch.optim.lr_scheduler.LambdaLR):
        model = make_model()
        engine = dslaunch.initialize(
            model=model,
            config=make_config(stage=2, gradient_accumulation_steps=2),
            lr_scheduler=lambda optimizer, kind=kind: kind(optimizer, lambda step: 1.0),
        )[0]
        for step in range(3):
            for micro in batch(step).chunk(2):
                engine.backward(loss_of(engine, micro.chunk(engine.world_size)[rank]))
                with contextlib.suppress(ArithmeticError):
                    engine.step()
        found.append(snapshot(model.named_parameters()))
    return (engine.global_steps, engine.micro_steps), *found


def test_a_step_whose_scheduler_raises_is_whole_all_the_same(ranks: Ranks) -> None:
    for counts, caught, plain in ranks(_trained_on, world_size=2):
        assert counts == (3, 6)
        assert_same_bits(caught, plain)
