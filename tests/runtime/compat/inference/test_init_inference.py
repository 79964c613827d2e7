"""init_inference() as programs for DeepSpeed call it: defaults, aliases, files, old names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dslaunch
from dslaunch.drop_in.calls import init_inference as deepspeeds
from dslaunch.runtime.compat.inference.config import DeepSpeedInferenceConfig
from dslaunch.runtime.compat.inference.init_inference import default_inference_config
from dslaunch.runtime.errors import ConfigError
from tests.runtime.answering_models import make_model
from tests.runtime.ranks import Ranks


def _calls(rank: int, folder: str) -> None:
    engine = deepspeeds(make_model("GPT2"))
    assert {param.dtype for param in engine.module.parameters()} == {torch.float16}
    too_long = torch.ones(1, 1025, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="Input with size 1025 exceeds maximum length of 1024"):
        engine.generate(input_ids=too_long)
    with pytest.raises(RuntimeError, match=r"Input with size 1025 .* or shorter prompts"):
        engine.generate(input_ids=too_long, num_beams=2)
    own = dslaunch.init_inference(make_model("GPT2"))
    assert own._config.dtype is torch.float32
    assert own._options.max_tokens is None

    defaults = default_inference_config()
    defaults["dtype"] = "bf16"
    engine = deepspeeds(make_model("GPT2"), config=defaults)
    assert engine.module.dtype is torch.bfloat16
    file = Path(folder) / "config.json"
    file.write_text(json.dumps({"kernel_inject": True, "dtype": "torch.float32", "tp": "auto"}))
    engine = deepspeeds(make_model("GPT2"), config=str(file), max_tokens=7)
    assert (engine._config.replace_with_kernel_inject, engine._config.max_out_tokens) == (True, 7)
    engine = deepspeeds(torch.nn.Linear(2, 2), dtype=torch.half, keep_module_on_host=True)
    assert engine.settings.zero.stage == 3
    stages = dslaunch.PipelineModule([torch.nn.Linear(2, 2)], num_stages=1)
    with pytest.raises(ConfigError, match="a model in stages, which does not generate"):
        deepspeeds(stages)


def test_programs_for_deepspeed_get_its_defaults(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_calls, str(tmp_path), world_size=1)


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({"mp_size": 2}, 2),
        ({"tp": {"tp_size": 2}}, 2),
        ({"tensor_parallel": {"tp_size": 2}, "mp_size": 2}, 2),
        ({"tp_size": 4}, 4),
        ({}, 1),
    ],
)
def test_names_of_one_size(given: dict[str, Any], size: int) -> None:
    assert DeepSpeedInferenceConfig(**given).tensor_parallel.tp_size == size


def test_experts_may_be_said_by_a_bool() -> None:
    assert DeepSpeedInferenceConfig(moe=False).moe.enabled is False
    assert DeepSpeedInferenceConfig(ep_size=2).moe.ep_size == 2
