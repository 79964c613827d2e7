"""Every column of the stage table decides something: one is turned over in a copy of the table, and memory
or wire change with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch.runtime.placement import stage_policy
from dslaunch.runtime.placement.stage_policy import Placement, Policy
from tests.runtime.models import (
    make_config,
    make_model,
    snapshot,
    train_engine,
    train_plain,
    worst_difference,
)
from tests.runtime.ranks import Ranks

STEPS = 2
DRIFT = 1e-6  # as in test_stages.py
R, S = Placement.REPLICATED, Placement.SHARDED


class Seen(NamedTuple):
    """What one rank has kept and sent in a training with two micro batches a step."""

    kept: int  # elements of parameters between their uses
    states: int  # elements of optimizer states
    gathers: int  # of units, for their use
    num_bytes: int  # given to collectives
    params: dict[str, Tensor]


def _seen(rank: int, stage: int, changes: dict[str, Any]) -> Seen:
    rows = tuple(replace(row, **changes) if row.stage == stage else row for row in stage_policy._POLICIES)
    with mock.patch.object(stage_policy, "_POLICIES", rows):
        model = make_model()
        config = make_config(stage=stage, gradient_accumulation_steps=2, reduce_bucket_size=50)
        engine = dslaunch.initialize(model=model, config=config)[0]
        train_engine(engine, steps=STEPS)
    sub_buffers = [sub_buffer for unit in engine._model.units for sub_buffer in unit.sub_buffers]
    return Seen(
        kept=sum(sub_buffer.param_shard.kept.numel() for sub_buffer in sub_buffers),
        states=sum(
            state.numel()
            for sub_buffer in sub_buffers
            for state in sub_buffer.optimizer_shard.states.values()
        ),
        gathers=sum(unit.num_gathers for unit in engine._model.units),
        num_bytes=sum(engine.comm_bytes().values()),
        params=snapshot(model.named_parameters()),
    )


def _seen_both(rank: int, stage: int, changes: dict[str, Any]) -> tuple[Seen, Seen]:
    return _seen(rank, stage, {}), _seen(rank, stage, changes)


class Turned(NamedTuple):
    """A column of a stage's row with another value, and what that makes of what was seen."""

    stage: int
    value: Any
    shows: Callable[[Seen, Seen], bool]  # of the table as it is, and of the copy


COLUMNS = {
    "parameters": Turned(3, R, lambda was, now: now.kept > 1.5 * was.kept and was.gathers > now.gathers == 0),
    "gradients": Turned(2, R, lambda was, now: now.num_bytes < 0.9 * was.num_bytes),  # reduced once a step
    "optimizer": Turned(0, S, lambda was, now: now.states < 0.6 * was.states),
    "reshard_after_forward": Turned(3, False, lambda was, now: now.gathers < 0.7 * was.gathers),
}


def test_every_column_is_turned_over() -> None:
    assert set(COLUMNS) == {field.name for field in fields(Policy)} - {"stage"}  # which is the row's name


@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_is_read_by_the_code_that_acts_on_it(ranks: Ranks, column: str) -> None:
    stage, value, shows = COLUMNS[column]
    model = make_model()
    train_plain(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1), steps=STEPS)
    expected = snapshot(model.named_parameters())
    for was, now in ranks(_seen_both, stage, {column: value}, world_size=2):
        assert shows(was, now), (was[:4], now[:4])
        assert worst_difference(was.params, expected) <= DRIFT
        assert worst_difference(now.params, expected) <= DRIFT
