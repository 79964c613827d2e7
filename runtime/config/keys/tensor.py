"""Layers that are divided over ranks."""

from __future__ import annotations

from .key import hint, is_empty, opaque, refused, used
from .value import BOOL, POSITIVE, TEXT

_SECTION = "tensor_parallel"

TENSOR = (
    used(
        f"{_SECTION}.autotp_size",
        "so many ranks hold one copy of the model together, each a part of the layers that the model's plan "
        "names; 0, as if left out, divides nothing",
    ),
    used(f"{_SECTION}.tp.tp_size", "another spelling of autotp_size"),
    refused(f"{_SECTION}.tp.tp_grain_size", POSITIVE, off=(1,), note="the last ranks' parts may be smaller"),
    opaque(f"{_SECTION}.tp.mpu", is_empty, "{}", "the ranks are consecutive ones"),
    opaque(f"{_SECTION}.tp.tp_group", is_empty, "{}", "the ranks are consecutive ones"),
    used(
        f"{_SECTION}.partition_config.layer_specs",
        "rules in place of the model's plan: objects with patterns, partition_type (column, row or skip), "
        "shape, partition_dim, gather_output, grad_allreduce and model_types; the first one that fits counts",
    ),
    hint(f"{_SECTION}.partition_config.use_default_specs", BOOL, "there are no rules but those given"),
    hint(f"{_SECTION}.partition_config.tp_size", POSITIVE, "autotp_size counts"),
    refused(f"{_SECTION}.partition_config.strict_mode", note="rules that fit no layer are named in any case"),
    used(
        f"{_SECTION}.vocab_parallel_lm_head",
        "the loss is computed from parts of the logits, which are never put together; for a Hugging Face "
        "causal model, whose output then has this rank's part; false if left out",
    ),
    refused(
        f"{_SECTION}.vocab_parallel_ce_backend", TEXT, off=("torch",), note="that is torch's loss_parallel"
    ),
    hint(f"{_SECTION}.dtype", TEXT, "bf16 and fp16 say what the model is trained in"),
    refused(f"{_SECTION}.tp_overlap_comm", note="a sum is waited for where it is used"),
    refused(
        f"{_SECTION}.preset_model",
        TEXT,
        off=("",),
        note="a Hugging Face model brings its own plan; else write partition_config",
    ),
    opaque(
        f"{_SECTION}.injection_policy_tuple",
        is_empty,
        "{}",
        "write partition_config, whose rules name layers",
    ),
    hint(f"{_SECTION}.keep_module_on_host", BOOL, "parameters go to the device part by part"),
    refused(f"{_SECTION}.replace_with_kernel_inject", note="it is for inference"),
    refused(f"{_SECTION}.kernel_inject", note="it is for inference"),
)
