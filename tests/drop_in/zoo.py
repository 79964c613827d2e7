"""The models of transformers, each in the smallest form that its config allows, and inputs for them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import configuration_auto, modeling_auto

VOCAB, WIDTH, IMAGE, LENGTH = 64, 16, 64, 8
BATCH = 2  # a rank; what norms over a batch needs more than one
LARGE = 3_000_000  # parameters; models that stay larger are left out
FIRST_WORD = 24  # token ids below are those with a meaning: padding, image tokens and the like
# Which head a model is taken with: the first of these that its type has, then the bare model.
HEADS = (
    "MASKED_LM",
    "CTC",
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "PRETRAINING",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "OBJECT_DETECTION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "MASK_GENERATION",
    "TEXT_TO_SPECTROGRAM",
    "TEXT_TO_WAVEFORM",
    "VISUAL_QUESTION_ANSWERING",
    "DOCUMENT_QUESTION_ANSWERING",
    "TABLE_QUESTION_ANSWERING",
    "TIME_SERIES_PREDICTION",
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "IMAGE_TO_IMAGE",
    "KEYPOINT_DETECTION",
    "MASKED_IMAGE_MODELING",
)

# Sizes by the names that configs have for them: the first pattern that fits the whole name.
_SIZES: tuple[tuple[str, Any], ...] = (
    (r"vocab_size|text_vocab_size|char_vocab_size|bpe_vocab_size", VOCAB),
    (r"(num_)?(hidden_|encoder_|decoder_|transformer_)?layers|n_layers?|depth|num_decoder_layers", 2),
    (r"num_(encoder|decoder|hidden)_blocks|encoder_num_hidden_layers|decoder_num_hidden_layers", 2),
    (r".*num_hidden_layers|num_layers", 2),
    (r".*(num|n)_(attention_)?heads?|(en|de)coder_attention_heads|num_(key_value|kv)_heads|n_heads?", 2),
    (r"linear_num_(key|value)_heads|.*num_key_value_heads", 2),
    (r"(hidden|embedding|attention_hidden|decoder_hidden|out_hidden|output_hidden)_(size|dim)", WIDTH),
    (r"d_model|n_embd|dim|embed_dim|emb_dim|embedding_dim|projection_dim|hidden_size_per_layer_input", WIDTH),
    (r"mm_hidden_size|projector_hidden_size|text_embed_dim|encoder_hidden_(size|dim)", WIDTH),
    (r"head_dim|d_kv|global_head_dim|v_head_dim|qk_nope_head_dim|linear_(key|value)_head_dim", 8),
    (r"qk_rope_head_dim", 8),
    (r"rotary_dim", 4),
    (r"kv_lora_rank|q_lora_rank|o_lora_rank", 8),
    (r".*intermediate_size|.*ffn_dim|d_ff|n_inner|.*mlp_dim|ffn_hidden_size|d_inner", 24),
    (r"max_position_embeddings|n_positions|max_seq_len|n_ctx|max_sequence_length", 64),
    (r"max_2d_position_embeddings|max_target_positions", 64),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|top_k", 2),
    (r"n_group|topk_group", 1),
    (r"image_size|pretrain_image_size", IMAGE),
    (r"patch_size", 8),
    (r"conv_dim", (8, 8)),
    (r"conv_kernel", (3, 3)),
    (r"conv_stride", (2, 2)),
    (r"num_feat_extract_layers", 2),
    (r"num_conv_pos_embeddings", 8),
    (r"num_conv_pos_embedding_groups", 2),
    (r"tdnn_dim", (8, 8, 8, 8, 8)),
    (r"codevector_dim|proj_codevector_dim|classifier_proj_size|xvector_output_dim", 8),
    (r"num_codevectors_per_group", 4),
    (r"sliding_window|attention_window|attention_chunk_size|block_size|local_attention", 8),
    (r"state_size|mamba_d_state|time_step_rank|mamba_d_conv", 4),
    (r"mamba_n_heads", 4),
    (r"mamba_d_head", 8),
    (r".*dropout.*|.*layerdrop|.*pdrop|.*drop_path.*|mask_(time|feature)_prob|drop_rate", 0.0),
    (r"num_queries|num_query_tokens|num_denoising", 4),
    (r"num_mel_bins", 8),
    (r"max_source_positions", 16),
)

# What some types need beside.
_MORE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "autoformer": {"prediction_length": 4, "context_length": 8},
    "informer": {"prediction_length": 4, "context_length": 8},
    "time_series_transformer": {"prediction_length": 4, "context_length": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma3n_text": {"num_hidden_layers": 2, "intermediate_size": 24, "activation_sparsity_pattern": None},
    "bit": {"num_groups": 4},
    "codegen": {"n_head": 4, "n_embd": 32, "rotary_dim": 2},
    "esm": {"vocab_size": VOCAB, "pad_token_id": 1},
    "hiera": {"num_classes": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "mamba2": {"num_heads": 4},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}


def classes(heads: Iterable[str] = HEADS) -> dict[str, str]:
    """Return the class of each model type, by the type's name: the first of these heads that it has."""
    tables = [getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in heads]
    found: dict[str, str] = {}
    for kind, names in modeling_auto.MODEL_MAPPING_NAMES.items():
        heads_of = [table[kind] for table in tables if kind in table]
        name = (heads_of or [names])[0]
        found[kind] = name if isinstance(name, str) else name[0]
    return found


def tiny_config(kind: type[PretrainedConfig]) -> PretrainedConfig:
    """Return a config of this class with small sizes, its parts too; dropout is off."""
    usual = kind()
    given: dict[str, Any] = {}
    for name, value in usual.to_dict().items():
        part = vars(usual).get(name)
        if isinstance(part, PretrainedConfig):
            given[name] = tiny_config(type(part))
        elif (small := _small(name, value)) is not None:
            given[name] = small
    made = kind(**(given | _MORE.get(kind.model_type, {})))
    _place_tokens(made)
    _divide_rotary(made)
    return made


def _divide_rotary(config: Any) -> None:
    """Let the parts of a rotary embedding for images fill a small head."""
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in (
        getattr(config, "ignore_keys_at_rope_validation", None) or ()
    ):
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def _small(name: str, value: Any) -> Any:
    for pattern, small in _SIZES:
        if re.fullmatch(pattern, name) and value is not None:
            if isinstance(value, (list, tuple)) and not isinstance(small, tuple):
                if not all(isinstance(one, (int, float)) for one in value):
                    return None
                return [small] * len(value)
            if isinstance(small, tuple) and not isinstance(value, (list, tuple)):
                return None
            return small if isinstance(value, (int, float, list, tuple)) and type(value) is not bool else None
    if name in ("depths", "layer_depths", "num_blocks") and isinstance(value, (list, tuple)):
        return [1] * len(value)
    if name in ("hidden_sizes", "embed_dims", "widths", "encoder_hidden_sizes", "neck_hidden_sizes"):
        return [WIDTH] * len(value) if isinstance(value, (list, tuple)) else None
    return None


def _place_tokens(config: PretrainedConfig) -> None:
    """Give tokens with a meaning ids within the vocabulary."""
    place = 3
    for name in sorted(vars(config)):
        value = getattr(config, name)
        is_token = name.endswith(("_token_id", "_token_index", "_token_ids"))
        if is_token and isinstance(value, (list, tuple)):
            setattr(config, name, [2])
        elif is_token and isinstance(value, int) and not 0 <= value < FIRST_WORD:
            setattr(config, name, min(place, FIRST_WORD - 1))
            place += 1


def config_of(kind: str) -> PretrainedConfig:
    """Return the small config of a model type."""
    return tiny_config(configuration_auto.CONFIG_MAPPING[kind])


def class_of(name: str) -> type[PreTrainedModel]:
    import transformers  # a module that makes what it is asked for

    found: type[PreTrainedModel] = getattr(transformers, name)
    return found


def inputs_for(model: PreTrainedModel, *, seed: int, size: int = BATCH) -> dict[str, Any]:
    """Return inputs that the model's forward can take, by the names of its arguments."""
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.config
    takes = inspect.signature(model.forward).parameters

    def words() -> torch.Tensor:
        return torch.randint(FIRST_WORD, VOCAB, (size, LENGTH), generator=generator)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(size, *shape, generator=generator)

    given: dict[str, Any] = {}
    if "input_ids" in takes:
        given["input_ids"] = words()
        if "attention_mask" in takes:
            given["attention_mask"] = torch.ones(size, LENGTH, dtype=torch.long)
        if "bbox" in takes:
            given["bbox"] = torch.zeros(size, LENGTH, 4, dtype=torch.long)
    main = model.main_input_name
    if main == "pixel_values" or ("pixel_values" in takes and hasattr(config, "projection_dim")):
        given["pixel_values"] = numbers(*_image_shape(config))
    if main == "pixel_values_videos" or (main == "pixel_values" and _frames(config)):
        given[main] = numbers(_frames(config) or 2, *_image_shape(config))
    if main == "input_values" or "input_values" in takes:
        bins = getattr(config, "num_mel_bins", None)
        length = getattr(config, "max_length", 0)
        given["input_values"] = numbers(length, bins) if bins and length else numbers(400)
    if main == "input_features" and "input_ids" not in takes:
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 8)
        frames = getattr(config, "max_source_positions", 16)
        turned = "mel" in (inspect.getdoc(model.forward) or "")[:0]
        given["input_features"] = numbers(frames * 2, bins) if turned else numbers(bins, frames * 2)
    if "decoder_input_ids" in takes:
        given["decoder_input_ids"] = words()
    if "return_loss" in takes:
        given["return_loss"] = True
    return given


def _part(config: Any, name: str) -> Any:
    for one in (config, *(getattr(config, part, None) for part in ("vision_config", "backbone_config"))):
        if one is not None and getattr(one, name, None) is not None:
            return getattr(one, name)
    return None


def _image_shape(config: Any) -> tuple[int, int, int]:
    side = _part(config, "image_size")
    sides = tuple(side) if isinstance(side, (list, tuple)) else (side or IMAGE,) * 2
    return (_part(config, "num_channels") or 3, *sides[-2:])


def _frames(config: Any) -> int | None:
    frames: int | None = getattr(config, "num_frames", None)
    return frames


def loss_of(output: Any) -> torch.Tensor:
    """Return the mean square of each number that a model gives and that depends on its parameters, added."""
    found = [one.float().pow(2).mean() for one in _tensors(output) if one.requires_grad]
    if not found:
        raise ValueError("no output depends on a parameter")
    return torch.stack(found).sum()


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        return [one for value in output.values() for one in _tensors(value)]
    if isinstance(output, (tuple, list)):
        return [one for value in output for one in _tensors(value)]
    return []
