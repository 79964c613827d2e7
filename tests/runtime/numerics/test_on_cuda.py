"""Comparisons on GPUs, on the fake device: what is noted of them is right, and nothing is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dslaunch
from tests.runtime.models import batch, loss_of, make_config, make_model
from tests.runtime.numerics.runs import compared
from tests.runtime.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.exhaustive]


def _train(rank: int, changes: dict[str, Any]) -> None:
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(**changes))
    dtype = next(engine.module.parameters()).dtype
    for step in range(2):
        with torch.device("cpu"):
            own = batch(step).chunk(dist.get_world_size())[rank]
        engine.backward(loss_of(engine, own.to(engine.device, dtype)))
        engine.step()


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": 3},
        {"stage": 2, "bf16": {"enabled": True}, "gradient_clipping": 0.05},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}},
    ],
)
def test_nothing_is_found_on_gpus(cuda_ranks: Ranks, tmp_path: Path, changes: dict[str, Any]) -> None:
    result = compared(cuda_ranks, _train, changes, folder=tmp_path)
    assert result.difference is None
    assert result.facts["device"] == "cuda"
