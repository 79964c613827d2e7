"""Keys of dtypes: of kept, computed and sent values."""

from __future__ import annotations

from .key import details, hint, refused
from .value import ANY, BOOL, INT, POSITIVE, SIZE, TEXT, TEXTS

PRECISION = (
    hint("bf16.immediate_grad_update", BOOL, "data_types.grad_accum_dtype says where gradients are added up"),
    hint("fp16.fused_mode", BOOL, "always so"),
    refused(
        "fp16.fp16_master_weights_and_grads",
        note="masters of float16 parameters are float32; offload_optimizer or a higher stage makes room",
    ),
    hint(
        "torch_autocast.lower_precision_safe_modules",
        TEXTS,
        "torch chooses by operation, and all gradients are averaged in float32",
    ),
    refused("amp.enabled", note='use "torch_autocast": {"enabled": true}, or "bf16"'),
    *details(
        "amp",
        opt_level=TEXT,
        cast_model_type=TEXT,
        patch_torch_functions=BOOL,
        keep_batchnorm_fp32=ANY,
        master_weights=BOOL,
        loss_scale=ANY,
        cast_model_outputs=TEXT,
        num_losses=POSITIVE,
        verbosity=INT,
        min_loss_scale=SIZE,
        max_loss_scale=SIZE,
    ),
)
