"""Whatever a model does with its parameters, every stage trains it as one process does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch.runtime.zero.units.unit import UnitState
from tests.exhaustive import few
from tests.runtime.models import batch, make_model, snapshot, worst_difference
from tests.runtime.ranks import Ranks
from tests.runtime.training.hard_models import KINDS, WIDTH, MixedDtypes, Model

STEPS = 3
STAGES = (0, 1, 2, 3)
SELDOM = (  # of `make test`; a case like each of them is there
    *(
        "Compiled",
        "Scripted1",
        "ReentrantOverParts",
        "ReentrantAround",
        "CheckpointInside",
        "SelectiveCheckpoint",
    ),
    *("TiedBlocks", "UsedByAnother", "CalledTwice", "UnusedParameter", "ViewChangedInPlace"),
)
LR = 0.1
# Means of means in float32, and SGD: a few roundings of numbers below 4. Seen: 3e-7.
DRIFT = 1e-6
# One layer is bfloat16, whose neighbours below 1 are 2^-8 apart; the sum of two ranks is rounded once.
DRIFT_BF16 = 2.0**-7


def make_config(stage: int, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 1,
        },
        **changes,
    }


def reference(kind: type[Model], num_ranks: int) -> dict[str, Tensor]:
    """One process that takes the ranks' parts of each batch one after the other."""
    model = make_model(kind)
    assert isinstance(model, Model)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in batch(step, width=WIDTH).chunk(num_ranks):
            (model.loss(model, part) / num_ranks).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return snapshot(model.named_parameters())


def _train(rank: int, kind: type[Model], stage: int) -> dict[str, Tensor]:
    model = make_model(kind)
    assert isinstance(model, Model)
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage))
    for step in range(STEPS):
        part = batch(step, width=WIDTH).chunk(engine.world_size)[rank]
        engine.backward(model.loss(engine, part))
        engine.step()
        check_freed(engine)
    hashes = engine._domains.job.all_gather_objects(engine.comm_order_hash(), what="x")
    assert len(set(hashes)) == 1
    return snapshot(model.named_parameters())


def check_freed(engine: dslaunch.Engine) -> None:
    """Between steps nothing of a sharded unit is here but the shard."""
    for unit in engine._model.units:
        assert unit.state is (UnitState.FREED if unit.is_sharded else UnitState.LIVE)
        for part in unit.sub_buffers:
            assert (part.param_shard.values.flat.untyped_storage().nbytes() == 0) == part.is_sharded


def _train_all(rank: int, kind: type[Model]) -> list[dict[str, Tensor]]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="The .grad attribute"
        )  # which torch.compile asks for by itself
        return [_train(rank, kind, stage) for stage in STAGES]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(
    "kind", few(KINDS, lambda kind: kind.__name__ not in SELDOM), ids=lambda kind: kind.__name__
)
def test_every_stage_trains_it_as_one_process_does(ranks: Ranks, kind: type[Model]) -> None:
    expected = reference(kind, 2)
    drift = DRIFT_BF16 if kind is MixedDtypes else DRIFT
    for results in ranks(_train_all, kind, world_size=2):
        for stage, params in zip(STAGES, results, strict=True):
            assert worst_difference(params, expected) <= drift, stage
