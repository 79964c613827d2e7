"""Tokens of engine.generate() are those of transformers with one process, for models of several kinds."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.errors import ConfigError
from tests.runtime.models import make_config
from tests.runtime.ranks import Ranks

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": {**SMALL, **TEXT, "num_key_value_heads": 2},
    "Qwen3": {**SMALL, **TEXT, "num_key_value_heads": 2, "head_dim": 8},
    "GPT2": {**TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "Mixtral": {**SMALL, **TEXT, "num_key_value_heads": 2, "num_local_experts": 4},
    "T5": {**TEXT, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
           "decoder_start_token_id": 0},
    "Whisper": {**TEXT, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
                "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
                "max_source_positions": 20, "decoder_start_token_id": 3},
}  # fmt: skip
CLASSES = {
    "GPT2": "GPT2LMHeadModel",
    "T5": "T5ForConditionalGeneration",
    "Whisper": "WhisperForConditionalGeneration",
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 8},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
}


def _model(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name])
    model = getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config)
    model.generation_config.max_length = None
    return model


def _inputs(name: str, rank: int) -> dict[str, Tensor]:
    """Return inputs of this rank; of texts, with padding at the left."""
    of_rank = torch.Generator().manual_seed(rank)
    if name == "Whisper":
        return {"input_features": torch.randn(2, 8, 40, generator=of_rank)}
    tokens = torch.randint(3, 64, (2, 4 + rank), generator=of_rank)
    mask = torch.ones_like(tokens)
    tokens[0, :2], mask[0, :2] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


def _same_tokens(rank: int, names: tuple[str, ...], weights: str | None, zero: dict[str, Any]) -> None:
    for name in names:
        plain = _model(name)
        config = make_config(stage=3, reduce_bucket_size=50)
        config["zero_optimization"] |= zero
        engine = dslaunch.initialize(model=copy.deepcopy(plain), config=config)[0]
        plain.eval()
        inputs = _inputs(name, rank)
        with engine.generating(weights=weights):
            for way, options in WAYS.items():
                if way == "static cache" and name in ("T5", "Whisper"):
                    continue
                length = {"max_new_tokens": 3 + 4 * rank, **options}
                torch.manual_seed(rank)
                wanted = plain.generate(**inputs, **length)
                torch.manual_seed(rank)
                made = engine.generate(**inputs, **length)
                assert torch.equal(made, wanted), (name, way, made, wanted)
        nn.Module.train(plain)
        engine.destroy()


@pytest.mark.parametrize("weights", [None, "units"])
def test_tokens_are_those_of_one_process(ranks: Ranks, weights: str | None) -> None:
    ranks(_same_tokens, ("Llama", "T5"), weights, {}, world_size=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", ["whole", "units"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
def test_tokens_of_all_models(ranks: Ranks, weights: str, stage: int, offload: str, tmp_path: Path) -> None:
    section = {"device": offload, **({"nvme_path": str(tmp_path)} if offload == "nvme" else {})}
    zero: dict[str, Any] = {"stage": stage}
    if offload != "none":
        zero["offload_optimizer"] = section
        if stage == 3:
            zero["offload_param"] = section
    ranks(_same_tokens, tuple(CONFIGS), weights, zero, world_size=2)


def _with_divided_layers(rank: int, weights: str) -> None:
    """Pairs of ranks are given the same prompts, and each pair others."""
    for name in ("Llama", "Qwen3"):
        plain = _model(name)
        config = make_config(stage=3, reduce_bucket_size=50, tensor_parallel={"autotp_size": 2})
        engine = dslaunch.initialize(model=copy.deepcopy(plain), config=config)[0]
        plain.eval()
        pair = engine.get_data_parallel_rank()
        length = {"max_new_tokens": 3 + 4 * pair, "do_sample": False}
        with engine.generating(weights=weights):
            for _ in range(2):
                made = engine.generate(**_inputs(name, pair), **length)
                assert torch.equal(made, plain.generate(**_inputs(name, pair), **length))
        with pytest.raises(ConfigError, match=r"different inputs: .*max_new_tokens.* is number 3 on rank"):
            engine.generate(**_inputs(name, pair), max_new_tokens=3 + rank % 2)
        engine.destroy()


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", ["whole", "units"])
def test_pairs_of_ranks_that_divide_layers_generate_as_much_as_they_like(ranks: Ranks, weights: str) -> None:
    ranks(_with_divided_layers, weights, world_size=4)


def _with_adapters(rank: int, weights: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():  # peft asks transformers by an old name
        warnings.simplefilter("ignore", FutureWarning)
        plain = peft.get_peft_model(_model("Llama"), adapters)
    config = make_config(stage=3, reduce_bucket_size=50)
    engine = dslaunch.initialize(model=copy.deepcopy(plain), config=config)[0]
    plain.eval()
    length = {"max_new_tokens": 3 + 4 * rank, "do_sample": False}
    with engine.generating(weights=weights):
        made = engine.generate(**_inputs("Llama", rank), **length)
    assert torch.equal(made, plain.generate(**_inputs("Llama", rank), **length))


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", ["whole", "units"])
def test_a_model_with_adapters_generates(ranks: Ranks, weights: str) -> None:
    ranks(_with_adapters, weights, world_size=2)
