"""Whose values count at the end of GatheredParameters is one of the ranks that hold the layers."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import dslaunch
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from tests.runtime.pipeline.test_train import config_of
from tests.runtime.ranks import Ranks


def _errors(rank: int) -> list[str]:
    module = PipelineModule([nn.Linear(4, 4) for _ in range(2)], 2, loss_fn=nn.functional.mse_loss)
    engine, *_ = dslaunch.initialize(model=module, config=config_of(3))
    found = []
    wrong: list[Any] = [1, -1, "0"]
    for modifier_rank in wrong:
        gathered = dslaunch.zero.GatheredParameters(list(module.parameters()), modifier_rank=modifier_rank)
        with pytest.raises(dslaunch.ConfigError) as caught, gathered:
            pass
        found.append(str(caught.value))
    engine.destroy()
    return found


def test_a_modifier_rank_that_holds_nothing_here_is_refused(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(_errors, world_size=2)):
        for given, said in zip(("1", "-1", "'0'"), found, strict=True):
            assert said == (
                f"GatheredParameters(modifier_rank={given}): must be a whole number from 0 to 0; it counts "
                f"the ranks that hold these layers, here rank {rank} of the job"
            )
