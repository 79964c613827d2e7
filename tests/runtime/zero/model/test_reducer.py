"""The hard cases of when a unit's gradients are finished, against one process (and test_step_reducer.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dslaunch
from dslaunch.runtime.errors import ConfigError
from tests.runtime.models import (
    ADAMW,
    Uneven,
    batch,
    loss_of,
    make_config,
    make_model,
    snapshot,
    train_engine,
    train_plain,
    worst_difference,
)
from tests.runtime.ranks import Ranks
from tests.runtime.zero.test_api import kept_warnings

pytestmark = pytest.mark.slow

STEPS = 4
DRIFT = 1e-6  # as in test_stages.py


class Twice(Uneven):
    """Every block is called twice in one forward, and the last one three times."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks, *self.blocks, self.blocks[-1]):
            x = x + block(x)
        result: Tensor = self.last(self.norm(x))
        return result


class Backwards(Uneven):
    """Blocks are used in another order than they are defined in."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in reversed(self.blocks):
            x = x + block(x)
        result: Tensor = self.last(self.norm(x))
        return result


class Checkpointed(Uneven):
    """Activation checkpointing of every block; the reentrant kind runs a backward inside the backward."""

    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.is_reentrant)
        result: Tensor = self.last(self.norm(x))
        return result


class Reentrant(Checkpointed):
    is_reentrant = True


class CheckpointedTwice(Uneven):
    """One block in two reentrant checkpoints: its gradients come in two goes."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = x + checkpoint(self.blocks[0], x, use_reentrant=True)
        for block in self.blocks[1:]:
            x = x + block(x)
        result: Tensor = self.last(self.norm(x))
        return result


KINDS = [Twice, Backwards, Checkpointed, Reentrant, CheckpointedTwice]


def _train(rank: int, kind: type[nn.Module], changes: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    model = make_model(kind)
    engine, *_ = dslaunch.initialize(
        model=model, config=make_config(stage=2, reduce_bucket_size=1, **changes)
    )
    train_engine(engine, steps=STEPS)
    assert all(param.grad is None for param in model.parameters())
    return snapshot(model.named_parameters()), engine.comm_order_hash()


@pytest.mark.parametrize(
    "changes", [{}, {"gradient_accumulation_steps": 2}], ids=["one", "two micro batches"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_training_is_the_one_of_a_single_process(
    ranks: Ranks, kind: type[nn.Module], changes: dict[str, Any]
) -> None:
    expected = make_model(kind)
    train_plain(expected, torch.optim.AdamW(expected.parameters(), lr=0.01, weight_decay=0.1), steps=STEPS)
    results = ranks(_train, kind, changes, world_size=2)
    for params, order in results:
        assert worst_difference(params, snapshot(expected.named_parameters())) <= DRIFT
        assert order == results[0][1]


class Branching(Uneven):
    """Which blocks are used is the rank's own affair: rank 0 leaves out the last, rank 1 the first,
    and in step 2 all.
    """

    rank, step = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        used = list(self.blocks)
        if self.step == 2:
            used = []
        elif self.rank is not None:
            used.pop(-1 if self.rank == 0 else 0)
        x = self.first(x)
        for block in used:
            x = x + block(x)
        result: Tensor = self.last(self.norm(x))
        return result


def _branch(rank: int) -> tuple[dict[str, Tensor], int]:
    model = make_model(Branching)
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=2, reduce_bucket_size=1))
    for step in range(STEPS):
        model.rank, model.step = rank, step
        train_engine(engine, steps=1, first=step)
    return snapshot(model.named_parameters()), engine.comm_order_hash()


def _branch_reference() -> dict[str, Tensor]:
    model = make_model(Branching)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW["params"])  # type: ignore[arg-type]
    for step in range(STEPS):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        for rank, half in enumerate(batch(step).chunk(2)):
            model.rank, model.step = rank, step
            (loss_of(model, half) / 2).backward()
        optimizer.step()
    return snapshot(model.named_parameters())


def test_ranks_may_use_different_units_and_none_waits_for_another(ranks: Ranks) -> None:
    results = ranks(_branch, world_size=2)
    for params, order in results:
        assert worst_difference(params, _branch_reference()) <= DRIFT
        assert order == results[0][1]


def _backward_without_engine(rank: int, kind: type[nn.Module]) -> dict[str, Tensor]:
    model = make_model(kind)
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=2, reduce_bucket_size=1))
    for step in range(STEPS):
        loss_of(engine, batch(step).chunk(2)[rank]).backward()
        engine.step()
    return snapshot(model.named_parameters())


def _two_losses(rank: int, kind: type[nn.Module]) -> dict[str, Tensor]:
    """The graph is walked twice, and each walk's gradients count."""
    model = make_model(kind)
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=2, reduce_bucket_size=1))
    for step in range(STEPS):
        loss = loss_of(engine, batch(step).chunk(2)[rank])
        engine.backward(loss * 0.25, retain_graph=True)
        engine.backward(loss * 0.75)
        engine.step()
    return snapshot(model.named_parameters())


@pytest.mark.parametrize("train", [_backward_without_engine, _two_losses])
@pytest.mark.parametrize("kind", [Uneven, Checkpointed])
def test_how_backward_is_called_makes_no_difference(
    ranks: Ranks, kind: type[nn.Module], train: Callable[[int, type[nn.Module]], dict[str, Tensor]]
) -> None:
    expected = make_model(kind)
    train_plain(expected, torch.optim.AdamW(expected.parameters(), lr=0.01, weight_decay=0.1), steps=STEPS)
    for params in ranks(train, kind, world_size=2):
        assert worst_difference(params, snapshot(expected.named_parameters())) <= DRIFT


class MoreAndMore(Uneven):
    """One block in more reentrant checkpoints than before."""

    num_uses = 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks[:-1]:
            x = x + block(x)
        for _ in range(self.num_uses):
            x = x + checkpoint(self.blocks[-1], x, use_reentrant=True)
        result: Tensor = self.last(self.norm(x))
        return result


def _use_more_often(rank: int, stage: int) -> tuple[dict[str, Tensor], list[bool], int]:
    model = make_model(MoreAndMore)
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=stage, reduce_bucket_size=1))
    was_behind = []
    for step in range(STEPS):
        model.num_uses = 1 + step % 2
        loss = loss_of(engine, batch(step).chunk(2)[rank])
        engine.backward(loss)
        was_behind.append(engine._model.is_behind)
        engine.step()
    return snapshot(model.named_parameters()), was_behind, engine.comm_order_hash()


@pytest.mark.parametrize("stage", [1, 2])
def test_a_gradient_that_comes_after_its_place_was_averaged_counts_too(ranks: Ranks, stage: int) -> None:
    """The block's turn comes at its first hand-in; from then on it is the last one."""
    expected = make_model(MoreAndMore)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(STEPS):
        expected.num_uses = 1 + step % 2
        train_plain_step(expected, optimizer, step)
    results = ranks(_use_more_often, stage, world_size=2)
    for params, was_behind, order in results:
        assert worst_difference(params, snapshot(expected.named_parameters())) <= DRIFT
        assert was_behind == [False, True, False, False]
        assert order == results[0][2]


class Failing(nn.Module):
    """Fails in the middle of a backward, once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Uneven()
        self.is_failing = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner.first(x)
        if self.is_failing:
            hidden.register_hook(self._fail)
        for block in self.inner.blocks:
            hidden = hidden + block(hidden)
        result: Tensor = self.inner.last(self.inner.norm(hidden))
        return result

    def _fail(self, grad: Tensor) -> Tensor:
        raise RuntimeError("on purpose")


def _fail_once(rank: int) -> dict[str, Tensor]:
    model = make_model(Failing)
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=2, reduce_bucket_size=1))
    for step in range(STEPS):
        model.is_failing = step == 2
        loss = loss_of(engine, batch(step).chunk(2)[rank])
        if model.is_failing:
            with pytest.raises(RuntimeError, match="on purpose"):
                engine.backward(loss)
            engine.zero_grad()
            continue
        engine.backward(loss)
        engine.step()
    return snapshot(model.named_parameters())


def test_after_a_backward_that_failed_the_next_one_is_clean(ranks: Ranks) -> None:
    expected = make_model(Failing)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01, weight_decay=0.1)
    for step in (0, 1, 3):
        train_plain_step(expected, optimizer, step)
    for params in ranks(_fail_once, world_size=2):
        assert worst_difference(params, snapshot(expected.named_parameters())) <= DRIFT


def train_plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, batch(step)).backward()
    optimizer.step()


def _gradient_by_hand(rank: int) -> str:
    model = make_model()
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=2))
    model.last.bias.grad = torch.ones(1)
    with pytest.raises(ConfigError) as refused:
        engine.step()
    return str(refused.value)


def test_a_gradient_that_is_set_by_hand_is_refused_by_name(ranks: Ranks) -> None:
    for message in ranks(_gradient_by_hand, world_size=2):
        assert message.startswith("parameter 'last.bias' was given a gradient by hand")


def _held_in_backward(rank: int) -> list[int]:
    """How many units have memory for whole gradients, at the time when autograd finishes each parameter."""
    model = make_model()
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=2, reduce_bucket_size=1))
    held: list[int] = []

    def count(_: Tensor) -> None:
        held.append(
            sum(
                sub_buffer.gradients.flat.untyped_storage().nbytes() > 0
                for sub_buffer in engine._model.trained
            )
        )

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(count)
    train_engine(engine, steps=1)
    held.clear()
    train_engine(engine, steps=1, first=1)
    return held


def test_only_few_units_have_memory_for_whole_gradients_at_a_time(ranks: Ranks) -> None:
    """The root holds its own from the head's to the first layer's; of the blocks,
    one is filled and one is on its way.
    """
    for held in ranks(_held_in_backward, world_size=2):
        assert max(held) <= 3


def _fail(engine: dslaunch.Engine, backward: Callable[[Tensor], object]) -> None:
    """A backward that raises after some units have been averaged."""

    def raise_error(*_: object) -> None:
        raise ZeroDivisionError

    handle = engine.module.get_submodule("blocks.0").register_full_backward_hook(raise_error)
    loss = loss_of(engine, batch(9).chunk(2)[engine.global_rank])
    handle.remove()
    with pytest.raises(ZeroDivisionError):
        backward(loss)


def _fail_and_go_on(rank: int, changes: dict[str, Any]) -> dict[str, Tensor]:
    """Each way of running the failed backward before each way of running the next."""
    model = make_model()
    config = make_config(reduce_bucket_size=1)
    config["zero_optimization"].update(changes)
    engine, *_ = dslaunch.initialize(model=model, config=config)
    ways: tuple[Callable[[Tensor], object], ...] = (
        engine.backward,
        lambda loss: engine.scale(loss).backward(),
    )
    for step in range(STEPS):
        _fail(engine, ways[step % 2])
        ways[step // 2](loss_of(engine, batch(step).chunk(2)[rank]))
        engine.step()
    with dslaunch.zero.GatheredParameters(model.parameters()):
        return snapshot(model.named_parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": 2},
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        {"stage": 3},
    ],
    ids=["stage 2", "offloaded", "stage 3"],
)
def test_what_a_failed_backward_made_is_dropped(ranks: Ranks, changes: dict[str, Any]) -> None:
    expected = make_model()
    train_plain(expected, torch.optim.AdamW(expected.parameters(), lr=0.01, weight_decay=0.1), steps=STEPS)
    for params in ranks(_fail_and_go_on, changes, world_size=2):
        assert worst_difference(params, snapshot(expected.named_parameters())) <= DRIFT


def _fail_in_second(rank: int) -> tuple[list[str], list[str], dict[str, Tensor]]:
    """What is said when the step goes on, and when it begins again."""
    model = make_model()
    config = make_config(stage=2, reduce_bucket_size=1, gradient_accumulation_steps=2)
    engine, *_ = dslaunch.initialize(model=model, config=config)
    train_engine(engine, steps=1)  # the ranks learn the order in which gradients come
    said = []
    for drops in (False, True):
        with kept_warnings() as lines:
            engine.backward(loss_of(engine, batch(8).chunk(2)[rank]))
            _fail(engine, engine.backward)
            if drops:
                engine.zero_grad()
            engine.backward(loss_of(engine, batch(7).chunk(2)[rank]))
        engine.zero_grad()
        said.append(lines)
    train_engine(engine, steps=STEPS - 1, first=1)
    return said[0], said[1], snapshot(model.named_parameters())


def test_what_a_failed_backward_added_to_earlier_micro_batches_is_told(ranks: Ranks) -> None:
    expected = make_model()
    train_plain(expected, torch.optim.AdamW(expected.parameters(), lr=0.01, weight_decay=0.1), steps=STEPS)
    results = ranks(_fail_in_second, world_size=2)
    assert [len(going_on) for going_on, _, _ in results] == [1, 0]
    assert results[0][0][0].startswith(
        "a backward failed after the ranks had averaged a part of its gradients"
    )
    for _, dropping, params in results:
        assert not dropping
        assert worst_difference(params, snapshot(expected.named_parameters())) <= DRIFT
