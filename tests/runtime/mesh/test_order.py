"""An order of axes that is said in one place, and what else was arranged by another one."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import nn

import dslaunch
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.runtime.compat.pipeline.topology import PipeDataParallelTopology
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.sequence import parallel_state
from dslaunch.shared.axes import Axes
from tests.runtime.ranks import Ranks
from tests.runtime.tensor.models import make_net

pytestmark = pytest.mark.slow

CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def _layers() -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(4)]


def _refused(rank: int, mesh: str, given: dict[str, Any]) -> str:
    """What initialize() says to such a mesh of the launcher."""
    model = given.pop("model", None) or make_net()
    config = {**CONFIG, **given.pop("config", {})}
    with patch.dict(os.environ, {"DSLAUNCH_MESH": mesh}), pytest.raises(ConfigError) as caught:
        dslaunch.initialize(model=model, config=config, **given)
    return str(caught.value)


def _all_refused(rank: int) -> dict[str, str]:
    model, group = make_net(), [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    dslaunch.tp_model_init(model, tp_size=2, tp_group=group)
    parallel_state.initialize_sequence_parallel(2)
    usual = PipelineModule(_layers(), topology=PipeDataParallelTopology(2, 2), loss_fn=nn.functional.mse_loss)
    sequences, config = "dp=2,sp=2,order=sp-dp", {"sequence_parallel_size": 2}
    return {
        "tp_group": _refused(rank, "dp=2,tp=2,order=tp-dp", {"model": model}),
        "mesh_param": _refused(rank, sequences, {"mesh_param": (2, 2)}),
        "mpu": _refused(rank, sequences, {"mpu": parallel_state, "config": config}),
        "topology": _refused(rank, "pp=2,dp=2,order=dp-pp", {"model": usual}),
        "ds_config": _refused(rank, "dp=2,tp=2,order=tp-dp", {"config": {"mesh": {"order": ["dp", "tp"]}}}),
    }


def test_what_was_arranged_in_another_order_is_refused_by_name(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks(_all_refused, world_size=4)):
        pair = [0, 1] if rank < 2 else [2, 3]
        line = [0, 2] if rank % 2 == 0 else [1, 3]
        assert said["tp_group"].startswith(
            f"tp_model_init(tp_group=...) has ranks {pair}, and with the order pp, tp, dp, sp of axes this "
            f"rank's axis tp is {line}"
        )
        assert "mesh_param=(2, 2)) has parts of sequences inside of data, and the order" in said["mesh_param"]
        assert f"ranks {pair} share a sequence there, and {line} here" in said["mpu"]
        assert "built for 2 stages x 2 ranks with data of their own" in said["topology"]
        assert "topology=ProcessTopology(axes=['data', 'pipe'], dims=[2, 2])" in said["topology"]
        assert said["ds_config"] == (
            "ds_config: the order of axes: dslaunch --mesh says tp, dp and the ds_config's section mesh says "
            "dp, tp; say the same in both, or leave one out"
        )


def _built(rank: int) -> tuple[Axes, Axes, int]:
    """The axes of a module without a topology, of its engine, and the module's stage."""
    mesh = {"DSLAUNCH_MESH": "pp=2,dp=2,order=dp-pp"}
    with patch.dict(os.environ, mesh):
        module = PipelineModule(_layers(), 2, loss_fn=nn.functional.mse_loss)
        engine, *_ = dslaunch.initialize(model=module, config=CONFIG)
    engine.destroy()
    return module.axes, engine._axes, module.stage_id


def test_a_module_takes_the_order_of_the_launcher(ranks: Ranks) -> None:
    for rank, (built, used, stage) in enumerate(ranks(_built, world_size=4)):
        assert built == used == Axes(pp=2, dp=2, order=("tp", "dp", "sp", "pp"))
        assert stage == rank % 2
