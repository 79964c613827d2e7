"""Ranks take a step with the same hyper-parameters and settings, such as can be used, or none does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch import ConfigError
from tests.runtime.models import Uneven, assert_same_bits, batch, make_model, snapshot
from tests.runtime.ranks import Ranks

LR = 0.125


def _engine(stage: int, kind: Callable[..., torch.optim.Optimizer], **keys: Any) -> Any:
    model = make_model(Uneven)
    zero = {"stage": stage, "reduce_bucket_size": 50, **keys.pop("zero", {})}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **keys}
    optimizer = kind(model.parameters(), lr=LR, momentum=0.5)
    return dslaunch.initialize(model=model, optimizer=optimizer, config=config)[0]


def _step(engine: Any, step: int = 0, **lr_kwargs: Any) -> None:
    engine.backward(engine(batch(step)).square().mean())
    engine.step(lr_kwargs or None)


# ---- hyper-parameters


def _values(engine: Any) -> dict[str, Tensor]:
    return snapshot(engine.state_dict())


def _refused(engine: Any, **lr_kwargs: Any) -> str:
    """What a step that is refused on all ranks says; it has changed nothing."""
    before, steps = _values(engine), engine.global_steps
    with pytest.raises(ConfigError) as caught:
        _step(engine, 1, **lr_kwargs)
    assert_same_bits(_values(engine), before)
    assert engine.global_steps == steps
    return str(caught.value)


def _set_by_rank(rank: int, stage: int) -> list[str]:
    engine = _engine(stage, torch.optim.SGD)
    group = engine.optimizer.param_groups[0]
    _step(engine)
    said = []
    for name, own, common in (("lr", LR * (rank + 1), LR), ("momentum", 0.25 * (rank + 1), 0.5)):
        group[name] = own
        said.append(_refused(engine))
        group[name] = common
        engine.zero_grad()
    engine.optimizer.clip_grad = rank + 1.0
    said.append(_refused(engine))
    engine.optimizer.clip_grad = 0.0
    engine.zero_grad()
    _step(engine, 2)
    return said


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_ranks_with_different_hyper_parameters_take_no_step(ranks: Ranks, stage: int) -> None:
    for lr, momentum, clip in ranks(_set_by_rank, stage, world_size=2):
        assert "param_groups[0]['lr'] is 0.25 on rank 1 and 0.125 on rank 0" in lr
        assert "param_groups[0]['momentum'] is 0.5 on rank 1 and 0.25 on rank 0" in momentum
        assert "gradient_clipping is 2.0 on rank 1 and 1.0 on rank 0" in clip
        assert "set the same on all ranks" in lr


def _plateau(rank: int) -> str:
    """A scheduler that follows each rank's own loss."""
    model = make_model(Uneven)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    engine, *_ = dslaunch.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}},
    )
    for step in range(2):
        _step(engine, metrics=float(step if rank else -step))
    return _refused(engine, metrics=0.0)


def test_a_scheduler_that_follows_a_ranks_own_metric_is_told_of(ranks: Ranks) -> None:
    for message in ranks(_plateau, world_size=2):
        assert "param_groups[0]['lr'] is 0.0125 on rank 1 and 0.125 on rank 0" in message
        assert "give a scheduler that follows a metric the mean over all ranks" in message


def _unusable(rank: int, kind: Callable[..., torch.optim.Optimizer]) -> list[str]:
    engine = _engine(1, kind)
    group = engine.optimizer.param_groups[0]
    _step(engine)
    said = []
    for name, value in (("lr", float("nan")), ("lr", "0.1"), ("lr", None), ("weight_decay", float("nan"))):
        was, group[name] = group[name], value
        said.append(_refused(engine))
        group[name] = was
        engine.zero_grad()
    if kind is torch.optim.SGD:  # whose kernel refuses this, and in the middle of a step
        group["lr"] = -LR if rank == 1 else LR
        said.append(_refused(engine))
        group["lr"] = LR
        engine.zero_grad()
    for number in (numpy.float32(LR), torch.tensor(LR), torch.tensor([LR]), 1):
        group["lr"] = number
        _step(engine, 2)
    return said


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_a_hyper_parameter_that_cannot_be_used_stops_the_step_before_it_begins(
    ranks: Ranks, kind: type[torch.optim.Optimizer]
) -> None:
    for said in ranks(_unusable, kind, world_size=2):
        values = ("nan", "'0.1'", "None")
        for message, value in zip(said, values, strict=False):
            assert f"param_groups[0] of the optimizer: lr: {value}; must be a finite number" in message
        assert "param_groups[0] of the optimizer: weight_decay: nan; must be" in said[3]
        assert all("lr: -0.125; must be a finite number, and >= 0" in message for message in said[4:])


# ---- settings


def _different(rank: int, ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    keys = dict(theirs if rank else ours)
    stage, kind = keys.pop("stage", 2), keys.pop("kind", torch.optim.SGD)
    with pytest.raises(ConfigError) as caught:
        _engine(stage, kind, **keys)
    return str(caught.value)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"stage": 2}, {"stage": 3}, "zero_optimization.stage is 3 on rank 1 and 2 on rank 0"),
        (
            {},
            {"gradient_clipping": 0.5},
            "gradient_clipping is 0.5 on rank 1 and 0.0 on rank 0; give initialize() the same ds_config",
        ),
        ({}, {"kind": torch.optim.RMSprop}, "optimizer is RMSprop on rank 1 and SGD on rank 0"),
        pytest.param(
            {},
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps is 2 on rank 1 and 1 on rank 0",
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["stage", "clipping", "optimizer", "micro batches"],
)
def test_ranks_with_different_settings_are_told_which(
    ranks: Ranks, ours: dict[str, Any], theirs: dict[str, Any], said: str
) -> None:
    for message in ranks(_different, ours, theirs, world_size=2):
        assert said in message


def _own_affairs(rank: int, folder: str) -> bool:
    offload = {"device": "nvme", "nvme_path": f"{folder}/{rank}", "pin_memory": bool(rank)}
    engine = _engine(
        1,
        torch.optim.SGD,
        zero={"offload_optimizer": offload},
        steps_per_print=rank + 1,
        wall_clock_breakdown=rank == 1,
        train_micro_batch_size_per_gpu=rank + 1,
    )
    _step(engine)
    engine.destroy()
    return True


def test_folders_batch_sizes_and_what_is_printed_are_a_ranks_own_affair(ranks: Ranks, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    assert ranks(_own_affairs, str(tmp_path), world_size=2) == [True, True]
