"""Whole modules of DeepSpeed's that are not here."""

from __future__ import annotations

from .table import (
    COMPRESSION,
    EXPERTS,
    INFERENCE,
    INSIDE,
    KERNELS,
    PIPELINES,
    TENSOR_PARALLEL,
    TUNING,
    Module,
    absent,
)

ABSENT: tuple[Module, ...] = (
    absent("deepspeed.autotuning", TUNING, "searches for batch sizes and stages"),
    absent("deepspeed.compile", INSIDE, "is DeepCompile; engine.compile() is torch.compile"),
    absent("deepspeed.compression", COMPRESSION, "prunes and quantizes models"),
    absent("deepspeed.inference", INFERENCE, "runs trained models"),
    absent("deepspeed.linear", COMPRESSION, "has linear layers with quantized or sharded bases"),
    absent("deepspeed.model_implementations", INFERENCE, "has models for inference"),
    absent("deepspeed.module_inject", TENSOR_PARALLEL, "replaces layers of a model"),
    absent("deepspeed.moe", EXPERTS, "has layers whose experts live on different ranks"),
    absent("deepspeed.moe.layer", EXPERTS, "has layers whose experts live on different ranks"),
    absent("deepspeed.pipe", PIPELINES, "cuts a model into stages"),
    absent("deepspeed.sequence", TENSOR_PARALLEL, "divides sequences between ranks"),
    absent("deepspeed.ops.transformer", KERNELS, "has kernels for layers"),
)
