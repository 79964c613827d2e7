"""Layers that are divided over ranks."""

from __future__ import annotations

from .key import hint, is_empty, opaque, refused
from .value import BOOL, POSITIVE, TEXT

_SECTION = "tensor_parallel"

TENSOR = (
    refused(f"{_SECTION}.tp.tp_grain_size", POSITIVE, off=(1,), note="the last ranks' parts may be smaller"),
    opaque(f"{_SECTION}.tp.mpu", is_empty, "{}", "the ranks are consecutive ones"),
    opaque(f"{_SECTION}.tp.tp_group", is_empty, "{}", "the ranks are consecutive ones"),
    hint(f"{_SECTION}.partition_config.use_default_specs", BOOL, "there are no rules but those given"),
    hint(f"{_SECTION}.partition_config.tp_size", POSITIVE, "autotp_size counts"),
    refused(f"{_SECTION}.partition_config.strict_mode", note="rules that fit no layer are named in any case"),
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
