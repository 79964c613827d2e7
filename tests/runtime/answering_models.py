"""Small models of transformers of several kinds, with inputs to generate from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

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
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 8},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "stopped": {"do_sample": False, "stop_strings": ["t7", "t11 ", "t30"]},
}
CLASSES = {
    "GPT2": "GPT2LMHeadModel",
    "T5": "T5ForConditionalGeneration",
    "Whisper": "WhisperForConditionalGeneration",
}


def make_model(name: str, **changes: Any) -> Any:
    """Return a model with the same values each time; `changes` are of its config."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**CONFIGS[name], **changes})
    model = getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config)
    model.generation_config.max_length = None
    return model


def make_inputs(name: str, rank: int) -> dict[str, Tensor]:
    """Return inputs of this rank; of texts, with padding at the left."""
    of_rank = torch.Generator().manual_seed(rank)
    if name == "Whisper":
        return {"input_features": torch.randn(2, 8, 40, generator=of_rank)}
    tokens = torch.randint(3, 64, (2, 4 + rank), generator=of_rank)
    mask = torch.ones_like(tokens)
    tokens[0, :2], mask[0, :2] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


def make_tokenizer() -> Any:
    """Return a tokenizer whose words are t1, t2 and so on; by that of number 0 transformers tries it out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"abcdef": 0} | {f"t{number}": number for number in range(1, 64)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="abcdef"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(prefix="##")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="abcdef", eos_token="t2")


def check_tokens(engine: Any, plain: Any, name: str, place: int, **more: dict[str, Any]) -> None:
    """Compare what an engine generates with a plain model, in all ways and in `more`; prompts and lengths are
    those of rank or group number `place`.
    """
    inputs = make_inputs(name, place)
    for way, options in (WAYS | more).items():
        length = {"max_new_tokens": 3 + 4 * place, **options}
        if "stop_strings" in options:
            length["tokenizer"] = make_tokenizer()
        torch.manual_seed(place)
        wanted = plain.generate(**inputs, **length)
        torch.manual_seed(place)
        made = engine.generate(**inputs, **length)
        assert torch.equal(made, wanted), (name, way, made, wanted)
