"""A parameter is frozen on all ranks that hold it, or parts or copies of it, or the step is an error."""

from __future__ import annotations

import pytest
import torch

import dslaunch
from dslaunch.moe import MoE
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.runtime.compat.pipeline.topology import ProcessTopology
from dslaunch.runtime.pipeline.layers import LayerSpec, TiedLayerSpec
from tests.runtime.pipeline.models import Block, Embed, Head, data, loss_fn
from tests.runtime.pipeline.test_three_axes import DIVIDED
from tests.runtime.pipeline.test_train import MICRO, SIZE, config_of, pairs
from tests.runtime.ranks import Ranks


def _freeze(rank: int, name: str, ranks: tuple[int, ...]) -> str:
    tied = [TiedLayerSpec("block", Block, tied_weight_attr=[]) for _ in range(2)]
    layers = [LayerSpec(Embed), LayerSpec(Block), tied[0], tied[1], LayerSpec(Block), LayerSpec(Head)]
    topology = ProcessTopology(axes=["pipe", "data", "model"], dims=[2, 1, 2])
    module = PipelineModule(layers, topology=topology, loss_fn=loss_fn, partition_method="uniform")
    engine, *_ = dslaunch.initialize(model=module, config=config_of(1, **DIVIDED))
    if rank in ranks:
        module.get_parameter(name).requires_grad_(False)
    with pytest.raises(dslaunch.ConfigError) as caught:
        engine.train_batch(pairs(*data(0, size=SIZE * MICRO), engine, MICRO))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "ranks_that_freeze", "told"),
    [
        ("1.norm.weight", (1,), "rank 1 and rank 0"),  # copies along tp
        ("1.up.weight", (0,), "rank 1 and rank 0"),  # parts along tp
        ("tied_modules.block.norm.weight", (2, 3), "rank 2 and rank 0"),  # on two stages
    ],
)
def test_what_one_of_its_ranks_freezes_is_named(
    ranks: Ranks, name: str, ranks_that_freeze: tuple[int, ...], told: str
) -> None:
    for said in ranks(_freeze, name, ranks_that_freeze, world_size=4):
        assert said.startswith(f"{told} do not train the same: parameter '{name}' was frozen")


def _freeze_expert(rank: int) -> tuple[bool, bool]:
    """Ranks 0 and 2 hold an expert that ranks 1 and 3 do not."""
    torch.manual_seed(0)
    model = MoE(8, torch.nn.Linear(8, 8), num_experts=2, ep_size=2, k=1)
    engine, *_ = dslaunch.initialize(model=model, config=config_of(1, gradient_accumulation_steps=1))
    experts = list(model.deepspeed_moe.experts.parameters())
    before = [param.detach().clone() for param in experts]
    if rank % 2 == 0:
        model.deepspeed_moe.experts.requires_grad_(False)
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(rank))
    engine.backward(engine(inputs)[0].pow(2).mean())
    engine.step()
    moved = [not torch.equal(one, param) for one, param in zip(before, experts, strict=True)]
    engine.destroy()
    return any(moved), all(moved)


def test_an_expert_is_frozen_on_the_ranks_that_hold_it(ranks: Ranks) -> None:
    assert ranks(_freeze_expert, world_size=4) == [(False, False), (True, True)] * 2
