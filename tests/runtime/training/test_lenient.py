"""What DeepSpeed takes, with a warning or without a word, and dslaunch.initialize() does not:
programs for DeepSpeed may.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch import ConfigError
from tests.runtime.models import assert_same_bits, make_config, make_model, snapshot, train_engine
from tests.runtime.ranks import Ranks
from tests.runtime.zero.test_api import kept_warnings

CPU = {"device": "cpu"}


def _trained(rank: int, zero: dict[str, Any], is_lenient: bool) -> tuple[dict[str, Tensor], list[str]]:
    model = make_model()
    config = make_config(stage=zero["stage"])
    config["zero_optimization"] |= zero
    with kept_warnings() as said:
        engine, *_ = dslaunch.initialize(model=model, config=config, is_lenient=is_lenient)
    engine.optimizer.clip_grad = 0.0  # the one other difference
    train_engine(engine, steps=2)
    return snapshot(model.named_parameters()), said


@pytest.mark.parametrize(
    ("stage", "section"),
    [(0, "offload_optimizer"), (0, "offload_param"), (1, "offload_param"), (2, "offload_param")],
)
def test_offload_of_what_is_not_sharded_has_no_effect_and_is_warned_of(
    ranks: Ranks, stage: int, section: str
) -> None:
    (values, said), _ = ranks(_trained, {"stage": stage, section: CPU}, True, world_size=2)
    assert said == [
        f"zero_optimization.{section} has no effect at stage {stage}, where every rank has all of it"
    ]
    assert_same_bits(values, ranks(_trained, {"stage": stage}, False, world_size=2)[0][0])


def test_cpu_offload_is_offload_optimizer(ranks: Ranks) -> None:
    old, new = ({"stage": 2, "cpu_offload": True}, {"stage": 2, "offload_optimizer": CPU})
    assert_same_bits(
        ranks(_trained, old, False, world_size=1)[0][0], ranks(_trained, new, False, world_size=1)[0][0]
    )


def _trained_in_half(rank: int, stage: int, is_said: bool) -> tuple[dict[str, Tensor], float, list[str]]:
    model = make_model().half()
    config = make_config(
        stage=stage, gradient_clipping=0.0, **({"fp16": {"enabled": True}} if is_said else {})
    )
    with kept_warnings() as said:
        engine, optimizer, *_ = dslaunch.initialize(model=model, config=config, is_lenient=not is_said)
    assert optimizer is not None
    train_engine(engine, steps=4, dtype=torch.float16)
    return snapshot(model.named_parameters()), optimizer.loss_scale, said


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_in_float16_trains_as_fp16_enabled_has_it(ranks: Ranks, stage: int) -> None:
    (values, scale, said), _ = ranks(_trained_in_half, stage, False, world_size=2)
    expected, expected_scale, _ = ranks(_trained_in_half, stage, True, world_size=2)[0]
    assert_same_bits(values, expected)
    assert scale == expected_scale > 1.0
    assert said == ["the model is float16 and fp16.enabled is not set: it counts as true"]


def _refused_in_half(rank: int) -> str:
    with pytest.raises(ConfigError) as caught:
        dslaunch.initialize(model=make_model().half(), config=make_config(stage=0), is_lenient=True)
    return str(caught.value)


def test_not_at_stage_0_where_deepspeed_does_not_either(ranks: Ranks) -> None:
    assert (
        "is torch.float16; trained parameters are float32 or bfloat16"
        in ranks(_refused_in_half, world_size=1)[0]
    )


def _scales(rank: int, stage: int, is_lenient: bool) -> list[float]:
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 2}
    engine, optimizer, *_ = dslaunch.initialize(
        model=make_model(), config=make_config(stage=stage, fp16=fp16), is_lenient=is_lenient
    )
    scales = []
    for _ in range(3):
        loss = engine(torch.full((2, 7), 3e4, dtype=torch.float16)).float().sum() * float("inf")
        engine.backward(loss)
        engine.step()
        scales.append(optimizer.loss_scale)  # type: ignore[union-attr]
    assert optimizer.needs_scaler()  # type: ignore[union-attr]
    return scales


@pytest.mark.parametrize(
    ("stage", "is_lenient", "scales"),
    [(0, True, [128, 64, 32]), (0, False, [256, 128, 64]), (2, True, [256, 128, 64])],
)
def test_without_zero_deepspeed_knows_no_hysteresis(
    ranks: Ranks, stage: int, is_lenient: bool, scales: list[float]
) -> None:
    assert ranks(_scales, stage, is_lenient, world_size=1)[0] == scales


def _saved_on_each_node(rank: int, folder: str, hosts: int) -> list[str]:
    config = make_config(stage=2, checkpoint={"use_node_local_storage": True})
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(2 // hosts)}), kept_warnings() as said:
        engine, *_ = dslaunch.initialize(model=make_model(), config=config, is_lenient=True)
    engine.save_checkpoint(folder)
    assert engine.load_checkpoint(folder)[0] is not None
    return said


@pytest.mark.parametrize("hosts", [1, 2])
def test_files_of_each_host_s_own_are_one_folder_that_all_see(
    ranks: Ranks, tmp_path: Path, hosts: int
) -> None:
    first, second = ranks(_saved_on_each_node, str(tmp_path), hosts, world_size=2)
    said = [line for line in first if "use_node_local_storage true is not done" in line]
    assert len(said) == hosts - 1
    assert not second
