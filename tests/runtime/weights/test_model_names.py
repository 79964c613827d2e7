"""engine.weights(names="hf"): what save_pretrained() of one process writes, name for name and bit for bit;
adapters merged, or alone.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import dslaunch
from dslaunch import ConfigError
from tests.runtime.models import assert_same_bits, make_config, make_model
from tests.runtime.ranks import Ranks

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "GPT2": {"n_embd": 16, "n_head": 2, "n_layer": 2},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "decoder_sparse_step": 1, **MOE},
    "DeepseekV3": {
        **MOE,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 4,
        "q_lora_rank": 4,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    },
}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


def make(kind: str, **changes: Any) -> Any:
    """A causal model of transformers, which the workers import late."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS[kind], **changes})
    return getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")(config)


def written(model: Any, folder: str) -> dict[str, Tensor]:
    """What its save_pretrained() writes on rank 0."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    (file,) = Path(folder).glob("*.safetensors")
    return load_file(file)


def taken(engine: Any, **arguments: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.weights(**arguments)}


class HfCase(NamedTuple):
    kind: str
    stage: int
    changes: dict[str, Any]


CASES = [
    HfCase("Llama", 3, {}),
    HfCase("Llama", 1, {"tensor_parallel": {"autotp_size": 2}}),
    HfCase("GPT2", 2, {}),
    HfCase("Mixtral", 3, {}),
    HfCase("Mixtral", 1, EXPERTS),
    HfCase("Qwen3Moe", 3, EXPERTS),
    HfCase("DeepseekV3", 3, {}),
]


def _as_saved(rank: int, folder: str) -> None:
    for number, case in enumerate(CASES):
        model = make(case.kind)
        expected = written(model, f"{folder}/{number}")
        engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=case.stage, **case.changes))
        found = taken(engine, names="hf")
        assert found.keys() == expected.keys(), case
        assert_same_bits(found, expected)
        engine.destroy()


def test_names_and_bits_are_those_of_the_files_that_one_process_writes(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_as_saved, str(tmp_path), world_size=2)


LORA: dict[str, dict[str, Any]] = {
    "Llama": {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]},
    "GPT2": {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_rslora": True},
    "DeepseekV3": {"target_modules": ["o_proj"], "use_dora": True},
    "Mixtral": {
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj"],
    },
}


def _adapted(rank: int, folder: str) -> None:
    peft = pytest.importorskip("peft")
    for number, (kind, options) in enumerate(LORA.items()):
        base = make(kind, tie_word_embeddings=False)
        lora = peft.LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, task_type="CAUSAL_LM", **options)
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            model = peft.get_peft_model(base, lora)
        adapter = written(model, f"{folder}/{number}-adapter")
        merged = written(copy.deepcopy(model).merge_and_unload(safe_merge=True), f"{folder}/{number}-merged")
        for stage in (1, 3):
            engine, *_ = dslaunch.initialize(model=copy.deepcopy(model), config=make_config(stage=stage))
            before = {name: value.clone() for name, value in engine.state_dict().items()}
            found = taken(engine, names="hf", merge_lora=True)
            assert found.keys() == merged.keys(), (kind, stage)
            assert_same_bits(found, merged)
            sent = engine._wire.meter.bytes_by_kind().get("parameters", 0)
            alone = taken(engine, names="hf", only_trainable=True)
            sent = engine._wire.meter.bytes_by_kind().get("parameters", 0) - sent
            assert alone.keys() == adapter.keys(), (kind, stage)
            assert_same_bits(alone, adapter)
            if stage == 3:  # the other half is here
                assert sent == sum(one.layout.numel * 4 for one in engine._model.trained) / 2
            apart = taken(engine, names="hf")
            assert {name for name in apart if ".lora_" in name} == {
                name for name in adapter if ".lora_" in name
            }
            assert merged.keys() == {name for name in apart if ".lora_" not in name}
            assert_same_bits(before, engine.state_dict())
            engine.destroy()


def test_adapters_are_merged_as_peft_merges_them_or_come_alone_as_it_saves_them(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(_adapted, str(tmp_path), world_size=2)


def _refused_names(rank: int) -> list[str]:
    said = []
    for make_one, arguments in (
        (make_model, {"names": "hf"}),
        (lambda: make("Llama"), {"names": "hf", "merge_lora": True}),
        (lambda: make("Llama"), {"names": "hugging"}),
    ):
        engine, *_ = dslaunch.initialize(model=make_one(), config=make_config(stage=3))
        with pytest.raises(ConfigError) as caught:
            engine.weights(**arguments)
        said.append(str(caught.value))
        engine.destroy()
    return said


def test_names_that_a_model_has_not_are_refused(ranks: Ranks) -> None:
    instead = "give names='module', or a function from a name to another one"
    for said in ranks(_refused_names, world_size=2):
        assert said == [
            "engine.weights(names='hf'): Uneven is no model of transformers, so it has no names that "
            f"from_pretrained() reads; {instead}",
            "engine.weights(merge_lora=True): LlamaForCausalLM has no layer of PEFT; leave it out",
            "engine.weights(names='hugging'): write 'module', 'hf', or give a function from a name to "
            "another one",
        ]
