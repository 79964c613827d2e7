"""Stages whose layers are divided over ranks, trained on several ranks' data: three axes at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch.runtime.pipeline.module import PipelineModule
from dslaunch.runtime.pipeline.topology import PipeModelDataParallelTopology
from dslaunch.utils import safe_get_full_fp32_param
from tests.runtime.pipeline.models import Judge, data, loss_fn, specs, take_values, train_alone
from tests.runtime.pipeline.test_train import MICRO, SIZE, Trained, check, config_of, pairs
from tests.runtime.ranks import Ranks

STEPS = 2
DIVIDED = {
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {
            "layer_specs": [
                {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
                {"patterns": [r".*\.down\.weight$"], "partition_type": "row"},
            ]
        },
    }
}


def _train(rank: int, dp: int, stage: int, schedule: str, is_tied: bool, folder: str) -> Trained:
    torch.manual_seed(rank)
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=dp)
    module = PipelineModule(
        specs(is_tied=is_tied),
        topology=topology,
        loss_fn=loss_fn,
        partition_method="uniform",
        schedule=schedule,
    )
    if module.mpu().get_data_parallel_id() == 0:
        take_values(module, Judge(is_tied=is_tied))
    engine, *_ = dslaunch.initialize(model=module, config=config_of(stage, **DIVIDED))
    losses, norms = [], []
    for step in range(STEPS):
        batch = data(step, size=SIZE * MICRO * dp)
        losses.append(engine.train_batch(pairs(*batch, engine, MICRO)).item())
        norms.append(engine.get_global_grad_norm())
    values = {name: safe_get_full_fp32_param(param) for name, param in module.named_parameters()}
    engine.save_checkpoint(folder, tag="here")
    engine.save_16bit_model(folder, "model.safetensors")
    engine.destroy()
    return losses, norms, values


def _whole(rank: int, folder: str, is_tied: bool) -> dict[str, Tensor]:
    module = PipelineModule(specs(is_tied=is_tied), 1, loss_fn=loss_fn)
    engine, *_ = dslaunch.initialize(model=module, config=config_of(3))
    engine.load_checkpoint(folder)
    return {name: safe_get_full_fp32_param(param) for name, param in module.named_parameters()}


@pytest.mark.parametrize(
    ("world_size", "stage", "schedule", "is_tied"),
    [(4, 3, "zbv", True), (8, 1, "1f1b", True), (8, 3, "1f1b", False)],
)
def test_stages_of_divided_layers_train_as_one_process(
    ranks: Ranks, tmp_path: Path, world_size: int, stage: int, schedule: str, is_tied: bool
) -> None:
    dp = world_size // 4
    judge = Judge(is_tied=is_tied)
    wanted = train_alone(judge, [data(step, size=SIZE * MICRO * dp) for step in range(STEPS)])
    found = ranks(_train, dp, stage, schedule, is_tied, str(tmp_path), world_size=world_size)
    check(found, wanted)
    for values in ranks(_whole, str(tmp_path), is_tied, world_size=2):
        for name, value in values.items():
            own = next(one[2][name] for one in found if name in one[2])
            assert torch.equal(value, own), name
    from safetensors.torch import load_file

    plain = Judge(is_tied=is_tied)
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for name, param in plain.named_parameters():
        torch.testing.assert_close(param.detach(), wanted[2][name], atol=2e-6, rtol=1e-5, msg=name)


def _axes_of_the_launcher(rank: int) -> tuple[dict[str, int], str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSLAUNCH_MESH", "pp=2,dp=1,tp=2")
        module = PipelineModule(specs(is_tied=False), 2, loss_fn=loss_fn)
        patch.setenv("DSLAUNCH_MESH", "tp=4")
        with pytest.raises(RuntimeError) as caught:
            PipelineModule(specs(is_tied=False), 2, loss_fn=loss_fn)
    return {"pp": module.axes.pp, "dp": module.axes.dp, "tp": module.axes.tp}, str(caught.value)


def test_a_module_takes_from_the_launcher_how_its_layers_are_divided(ranks: Ranks) -> None:
    for sizes, said in ranks(_axes_of_the_launcher, world_size=4):
        assert sizes == {"pp": 2, "dp": 1, "tp": 2}
        assert said.startswith(
            "num_stages 2 and dslaunch --mesh tp=4: pp=2 * tp=4 does not divide the 4 ranks"
        )
