"""Sequences that are divided over ranks: Ulysses, and compute in tiles."""

from __future__ import annotations

from .table import TENSOR_PARALLEL, Module, absent, inside, mapped, refused, works

_AUTO = "finds the layers to divide by itself; register_with_transformers() takes models of transformers"
_VOCABULARY = "divides the vocabulary by itself; tensor_parallel.vocab_parallel_lm_head does"
_LOSS = works("dslaunch.runtime.sequence.loss", "vocab_sequence_parallel_cross_entropy")
_OTHER_LOSSES = refused(
    TENSOR_PARALLEL,
    "VocabParallelCausalLMLoss VocabParallelCrossEntropyLoss configure_vocab_parallel_loss "
    "vocab_parallel_cross_entropy",
    _VOCABULARY,
)

SEQUENCES: tuple[Module, ...] = (
    Module(
        "deepspeed.sequence",
        (
            refused(
                TENSOR_PARALLEL,
                "InternVLFusionAdapter LlavaFusionAdapter ModalityFusionSPAdapter Qwen2VLFusionAdapter "
                "SPModelInfo UlyssesSPViTAttention auto_wrap_model_for_sp detect_model_sp_info",
                _AUTO,
            ),
            _OTHER_LOSSES,
        ),
    ),
    *(
        absent(f"deepspeed.sequence.{name}", TENSOR_PARALLEL, _AUTO)
        for name in ("auto_sp", "autosp_detector", "autosp_fusion", "autosp_vit", "test_autosp")
    ),
    *(
        absent(f"deepspeed.sequence.{name}", TENSOR_PARALLEL, _VOCABULARY)
        for name in ("linear_cross_entropy", "vocab_parallel_ops")
    ),
    absent(
        "deepspeed.sequence.fpdt_layer",
        TENSOR_PARALLEL,
        "computes attention in chunks from host memory; TiledMLP and activation checkpointing make room",
    ),
    Module(
        "deepspeed.sequence.layer",
        (
            works("dslaunch.runtime.sequence.attention", "DistributedAttention apply_rotary_pos_emb"),
            inside("post_all2all pre_all2all_fun register_all_to_all_group"),
            refused(
                TENSOR_PARALLEL,
                "single_all_to_all uneven_heads_all2all",
                "is a part of DistributedAttention, which is here",
            ),
        ),
    ),
    Module(
        "deepspeed.sequence.cross_entropy",
        (_LOSS, _OTHER_LOSSES, inside("validate_vocab_parallel_loss")),
    ),
    Module("deepspeed.runtime.sequence_parallel"),
    Module(
        "deepspeed.runtime.sequence_parallel.ulysses_sp",
        (
            mapped(
                "dslaunch.runtime.sequence.hugging_face",
                "UlyssesSPAttentionHF",
                "with a way back: unregister_from_transformers()",
            ),
            works("dslaunch.runtime.sequence.loader", "UlyssesSPDataLoaderAdapter"),
            mapped(
                "dslaunch.runtime.sequence.tiled",
                "sequence_tiled_compute TiledMLP TiledFusedLogitsLoss",
                "each tile is a checkpoint of torch's, and no autograd function of its own",
            ),
            inside("SequenceTiledCompute AutogradComputeMLP"),
        ),
    ),
    Module(
        "deepspeed.runtime.sequence_parallel.parallel_state_sp",
        (
            works(
                "dslaunch.runtime.sequence.parallel_state",
                "initialize_sequence_parallel get_sequence_parallel_group get_sequence_data_parallel_group "
                "get_sequence_parallel_world_size get_sequence_data_parallel_world_size "
                "get_sequence_parallel_rank get_sequence_data_parallel_rank get_model_parallel_rank "
                "get_model_parallel_world_size get_model_parallel_group",
            ),
        ),
    ),
)
