"""Optimizers of bitsandbytes that a program brings keep their 8-bit states, with the bits of one process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError
from tests.runtime.models import assert_same_bits, make_config, snapshot
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="needs bitsandbytes: pip install --group drop-in"
)
NAMES = ("AdamW8bit", "Lion8bit")
WIDTH = 64  # matrices of 8,192 elements: those with fewer than 4,096 have states in float32
PLACES: tuple[dict[str, Any], ...] = (
    {"stage": 1},
    {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    {"stage": 3, "stage3_param_persistence_threshold": 0},
)
STEPS = 3


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def _loss(model: Any, step: int) -> Tensor:
    """Each rank has the same samples, so that their average has the same bits."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    loss: Tensor = model(x).square().mean()
    return loss


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    import bitsandbytes

    made: torch.optim.Optimizer = getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-2)
    return made


def _alone(name: str) -> dict[str, Tensor]:
    """Judge: bitsandbytes and torch alone."""
    model = _model()
    optimizer = _optimizer(name, model)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
    assert {one["state1"].dtype for one in optimizer.state.values()} == {torch.uint8, torch.float32}
    return snapshot(model.state_dict())


def _train(rank: int, folder: Path, first: int) -> None:
    for name in NAMES:
        expected = _alone(name)
        for number, place in enumerate(PLACES):
            model = _model()
            world_size = torch.distributed.get_world_size()
            config = make_config(
                train_batch_size=4 * world_size, zero_optimization={**place, "reduce_bucket_size": 50}
            )
            config["optimizer"] = None
            engine, *_ = dslaunch.initialize(model=model, optimizer=_optimizer(name, model), config=config)
            if first:
                engine.load_checkpoint(folder / f"{name} {(number + 1) % len(PLACES)}")
            for step in range(first, 2 * STEPS):
                if step == STEPS and not first:
                    engine.save_checkpoint(folder / f"{name} {number}")
                engine.backward(_loss(engine, step))
                engine.step()
            assert_same_bits(snapshot(engine.state_dict()), expected)
            engine.destroy()


@pytest.mark.slow
def test_they_train_and_resume_at_other_stages_and_worlds_as_alone(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_train, tmp_path, 0, world_size=2)
    ranks(_train, tmp_path, STEPS, world_size=1)


def test_files_take_one_parameter_after_the_other_only_from_an_optimizer_that_says_it_may() -> None:
    model = _model()
    config = make_config(stage=2)
    config["optimizer"] = None
    config["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": "unused"}
    with pytest.raises(ConfigError, match=r"AdamW8bit may compute .* attribute is_per_parameter = True"):
        dslaunch.initialize(model=model, optimizer=_optimizer("AdamW8bit", model), config=config)
