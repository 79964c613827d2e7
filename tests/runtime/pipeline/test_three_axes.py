"""Stages whose layers are divided over ranks, trained on several ranks' data: three axes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.runtime.compat.pipeline.topology import PipeModelDataParallelTopology, ProcessTopology
from dslaunch.runtime.pipeline.layers import LayerSpec, TiedLayerSpec
from dslaunch.utils import safe_get_full_fp32_param
from dslaunch.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.runtime.models import assert_same_bits
from tests.runtime.pipeline.models import (
    Block,
    Embed,
    Head,
    Judge,
    data,
    loss_fn,
    specs,
    take_values,
    train_alone,
)
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


def _train(rank: int, folder: str) -> Trained:
    torch.manual_seed(rank)
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    module = PipelineModule(
        specs(is_tied=True),
        topology=topology,
        loss_fn=loss_fn,
        partition_method="uniform",
        schedule="zbv",
    )
    take_values(module, Judge(is_tied=True))
    engine, *_ = dslaunch.initialize(model=module, config=config_of(3, **DIVIDED))
    losses, norms = [], []
    for step in range(STEPS):
        batch = data(step, size=SIZE * MICRO)
        losses.append(engine.train_batch(pairs(*batch, engine, MICRO)).item())
        norms.append(engine.get_global_grad_norm())
    values = {name: safe_get_full_fp32_param(param) for name, param in module.named_parameters()}
    engine.save_checkpoint(folder, tag="here")
    engine.save_16bit_model(folder, "model.safetensors")
    assert_same_bits(dict(engine.weights()), load_file(f"{folder}/model.safetensors"))
    engine.destroy()
    return losses, norms, values


def _whole(rank: int, folder: str) -> dict[str, Tensor]:
    module = PipelineModule(specs(is_tied=True), 1, loss_fn=loss_fn)
    engine, *_ = dslaunch.initialize(model=module, config=config_of(3))
    engine.load_checkpoint(folder)
    return {name: safe_get_full_fp32_param(param) for name, param in module.named_parameters()}


def test_stages_of_divided_layers_train_as_one_process(ranks: Ranks, tmp_path: Path) -> None:
    """With a tied layer, and files; without, and with several copies: training/test_parity.py."""
    wanted = train_alone(Judge(is_tied=True), [data(step, size=SIZE * MICRO) for step in range(STEPS)])
    found = ranks(_train, str(tmp_path), world_size=4)
    check(found, wanted)
    for values in ranks(_whole, str(tmp_path), world_size=2):
        for name, value in values.items():
            own = next(one[2][name] for one in found if name in one[2])
            assert torch.equal(value, own), name
    plain = Judge(is_tied=True)
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for name, param in plain.named_parameters():
        torch.testing.assert_close(param.detach(), wanted[2][name], atol=2e-6, rtol=1e-5, msg=name)


def _tied_blocks() -> list[Any]:
    tied = [TiedLayerSpec("block", Block, tied_weight_attr=[]) for _ in range(2)]
    return [LayerSpec(Embed), tied[0], LayerSpec(Block), LayerSpec(Block), tied[1], LayerSpec(Head)]


class _JudgeOfTiedBlocks(nn.Module):
    """All of these layers in one module, with the names that a PipelineModule gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tied_modules = nn.ModuleDict({"block": Block()})
        for number, layer in {"0": Embed(), "2": Block(), "3": Block(), "5": Head()}.items():
            self.add_module(number, layer)

    def forward(self, x: Tensor) -> Tensor:
        for number in ("0", "tied_modules.block", "2", "3", "tied_modules.block", "5"):
            x = self.get_submodule(number)(x)
        return x


def _train_tied_blocks(rank: int, folder: str) -> Trained:
    topology = ProcessTopology(axes=["pipe", "data", "model"], dims=[2, 1, 2])
    torch.manual_seed(rank)
    module = PipelineModule(_tied_blocks(), topology=topology, loss_fn=loss_fn, partition_method="uniform")
    judge = _JudgeOfTiedBlocks()
    if rank > 1:  # the first stage has the values that count
        nn.init.zeros_(judge.get_parameter("tied_modules.block.up.weight"))
    take_values(module, judge)
    engine, *_ = dslaunch.initialize(model=module, config=config_of(3, **DIVIDED))
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(engine.train_batch(pairs(*data(step, size=SIZE * MICRO), engine, MICRO)).item())
        norms.append(engine.get_global_grad_norm())
    values = {name: safe_get_full_fp32_param(param) for name, param in module.named_parameters()}
    engine.save_checkpoint(folder)
    engine.destroy()
    return losses, norms, values


def test_a_tied_layer_on_two_stages_may_be_divided(ranks: Ranks, tmp_path: Path) -> None:
    wanted = train_alone(_JudgeOfTiedBlocks(), [data(step, size=SIZE * MICRO) for step in range(STEPS)])
    check(ranks(_train_tied_blocks, str(tmp_path), world_size=4), wanted)
    saved = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    for name, value in wanted[2].items():
        torch.testing.assert_close(saved[name], value, atol=2e-6, rtol=1e-5, msg=name)


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
