"""Weights of torchao: which are refused, and what a program reads and writes of those that are sharded."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from tests.runtime.packed_models import WIDTH, make_quantized
from tests.runtime.ranks import Ranks

pytest.importorskip("torchao", reason="needs torchao: pip install --group drop-in")
CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
REFUSED = {
    "quantizes inputs": r"'head.weight' is torchao's Int8Tensor that quantizes its inputs, too",
    "another class": r"'head.weight' is torchao's NF4Tensor; those of Int8Tensor, Float8Tensor",
    "trained": r"'blocks.0.0.base_layer.weight' is torchao's Int8Tensor and requires a gradient",
}


def _initialize(model: nn.Module) -> Any:
    trained = [param for param in model.parameters() if param.requires_grad]
    return dslaunch.initialize(model=model, model_parameters=trained, config=CONFIG)[0]


def _refusals(rank: int) -> dict[str, str]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    messages = {}
    for case in REFUSED:
        model: Any = make_quantized("torchao")
        if case == "quantizes inputs":
            quantize_(model, Int8DynamicActivationInt8WeightConfig(), lambda module, name: name == "head")
        elif case == "another class":
            model.head.weight = nn.Parameter(to_nf4(torch.ones(WIDTH, WIDTH)), requires_grad=False)
        else:
            model.blocks[0][0].base_layer.weight.requires_grad_(True)
        with pytest.raises(dslaunch.ConfigError) as error:
            _initialize(model)
        messages[case] = str(error.value)
    return messages


def _edit(rank: int) -> tuple[list[Tensor], str]:
    """Return what the weight was, rank 0's other weight, and what it is then; and an error outside."""
    model = make_quantized("torchao")
    engine = _initialize(model)
    weight: Any = model.blocks[0][0].base_layer.weight
    other: Any = make_quantized("torchao", seed=1 + rank).blocks[0][0].base_layer.weight
    found = []
    with dslaunch.zero.GatheredParameters(weight):
        found.append(weight.dequantize())
    with dslaunch.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight.copy_(other)
    with dslaunch.zero.GatheredParameters(model.parameters()):
        found.append(weight.dequantize())
    with pytest.raises(dslaunch.ConfigError) as error:
        weight.dequantize()
    engine.destroy()
    return found, str(error.value)


def test_weights_beside_which_nothing_could_be_trained_are_refused(ranks: Ranks) -> None:
    messages, *_ = ranks(_refusals, world_size=1)
    for case, message in messages.items():
        assert re.match(f"parameter {REFUSED[case]}", message), message


def test_a_program_reads_and_writes_a_weight_where_it_is_gathered(ranks: Ranks) -> None:
    expected = [make_quantized("torchao", seed=seed).blocks[0][0].base_layer.weight for seed in (0, 1)]
    for found, message in ranks(_edit, world_size=2):
        for value, weight in zip(found, expected, strict=True):
            assert torch.equal(value, weight.dequantize())
        assert "'blocks.0.0.base_layer._weight_qdata'" in message
        assert "sharded over the ranks" in message
