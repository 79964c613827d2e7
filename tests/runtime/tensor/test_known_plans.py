"""Models of transformers without a plan of their own, divided by ours: one step as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import dslaunch
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.tensor.known_plans import KNOWN_PLANS
from tests.runtime.answering_models import transformers
from tests.runtime.ranks import Ranks

LR = 0.5
HEADS = ("num_heads", "n_heads", "num_attention_heads")
CLOSE = {"atol": 2e-6, "rtol": 1e-4}  # sums in another order
TEXT = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {**TEXT, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
           "num_attention_heads": 4, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
           "max_position_embeddings": 40}  # fmt: skip
BOTH = {**TEXT, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0,
        "max_position_embeddings": 40, "decoder_start_token_id": 2}  # fmt: skip
T5 = {**TEXT, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0,
      "decoder_start_token_id": 0}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", BOTH),
    "bert": ("BertForMaskedLM", ENCODER),
    "gpt2": ("GPT2LMHeadModel", {**TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0,
                                 "resid_pdrop": 0, "embd_pdrop": 0}),
    "gpt_neo": ("GPTNeoForCausalLM", {**TEXT, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
                                      "attention_types": [[["global", "local"], 1]], "window_size": 4,
                                      "intermediate_size": 48, "max_position_embeddings": 40}),
    "gptj": ("GPTJForCausalLM", {**TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4,
                                 "n_positions": 40}),
    "mbart": ("MBartForConditionalGeneration", BOTH),
    "mt5": ("MT5ForConditionalGeneration", T5),
    "opt": ("OPTForCausalLM", {**TEXT, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48,
                               "num_attention_heads": 4, "word_embed_proj_dim": 32, "dropout": 0,
                               "max_position_embeddings": 40}),
    "roberta": ("RobertaForMaskedLM", ENCODER),
    "t5": ("T5ForConditionalGeneration", T5),
    "wav2vec2": ("Wav2Vec2ForCTC", {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
                                    "num_hidden_layers": 2, "num_attention_heads": 4, "layerdrop": 0,
                                    "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
                                    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
                                    "num_conv_pos_embedding_groups": 2}),
    "whisper": ("WhisperForConditionalGeneration", {**BOTH, "num_mel_bins": 8, "max_source_positions": 20,
                                                    "max_target_positions": 40}),
}  # fmt: skip


def _inputs(name: str) -> dict[str, torch.Tensor]:
    if name == "wav2vec2":
        return {"input_values": torch.randn(2, 400)}
    labels = torch.randint(3, 64, (2, 9))
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 40), "labels": labels}
    return {"input_ids": torch.randint(3, 64, (2, 9)), "labels": labels}


def _loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.logits.square().mean() if output.loss is None else output.loss
    return loss


def _steps(rank: int, names: tuple[str, ...], attention: str) -> None:
    for name in names:
        torch.manual_seed(0)
        kind, sizes = MODELS[name]
        model = getattr(transformers, kind)(transformers.CONFIG_MAPPING[name](**sizes)).eval()
        if attention == "eager" or model._supports_sdpa:
            model.set_attn_implementation(attention)
        plain, inputs = copy.deepcopy(model), _inputs(name)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "tensor_parallel": {"autotp_size": 2},
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
            "zero_optimization": {"stage": 1},
        }
        engine, *_ = dslaunch.initialize(model=model, config=config)
        wanted, made = plain(**inputs), engine(**inputs)
        torch.testing.assert_close(made.logits, wanted.logits, atol=2e-5, rtol=1e-4)
        _loss(wanted).backward()
        engine.backward(_loss(made))
        engine.step()
        with torch.no_grad():
            for param in plain.parameters():
                if param.grad is not None:
                    param -= LR * param.grad
        state = engine.state_dict()
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value, msg=lambda text, key=key: f"{key}: {text}", **CLOSE)
        heads = [getattr(one, name) for name in HEADS for one in model.modules() if hasattr(one, name)]
        assert set(heads) <= {4}
        engine.destroy()


def test_a_step_is_that_of_one_process(ranks: Ranks) -> None:
    ranks(_steps, ("gpt2", "t5"), "eager", world_size=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_step_of_all_models_is_that_of_one_process(ranks: Ranks, attention: str) -> None:
    assert MODELS.keys() == KNOWN_PLANS.keys()
    ranks(_steps, tuple(MODELS), attention, world_size=2)


def test_heads_that_ranks_do_not_divide_are_named(ranks: Ranks) -> None:
    ranks(_refuses_heads, world_size=2)


def _refuses_heads(rank: int) -> None:
    kind, sizes = MODELS["whisper"]
    config = transformers.WhisperConfig(**{**sizes, "decoder_attention_heads": 1})
    with pytest.raises(ConfigError, match="does not divide the model's decoder_attention_heads, 1"):
        dslaunch.init_inference(getattr(transformers, kind)(config), tp_size=2)
