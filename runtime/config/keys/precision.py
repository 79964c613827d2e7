"""In which dtype what is kept, computed and sent."""

from __future__ import annotations

from .key import details, hint, refused, used
from .value import ANY, BOOL, INT, POSITIVE, SIZE, TEXT, TEXTS

PRECISION = (
    used("bf16.enabled", "bfloat16 parameters and gradients with a float32 master copy (old name: bfloat16)"),
    hint("bf16.immediate_grad_update", BOOL, "data_types.grad_accum_dtype says where gradients are added up"),
    used(
        "bf16.check_grad_overflow",
        "skip a step whose gradients are infinite or NaN; true if left out. False: it is "
        "applied, without clipping",
    ),
    refused(
        "bf16.bf16_master_weights_and_grads",
        note="masters are always float32; offload_optimizer or a higher stage makes room",
    ),
    refused(
        "bf16.bf16_optimizer_states",
        note="states are always float32; offload_optimizer or a higher stage makes room",
    ),
    used("fp16.enabled", "float16 parameters and gradients with a float32 master copy, and a scaled loss"),
    used("fp16.auto_cast", "floating-point inputs of the model become float16"),
    used("fp16.loss_scale", "a constant; 0, which is the default: as large as the gradients allow"),
    used("fp16.initial_scale_power", "it begins at 2 to the power of this; 16 if left out"),
    used("fp16.loss_scale_window", "it is doubled after so many steps without inf or NaN; 1000 if left out"),
    used("fp16.hysteresis", "so many steps with inf or NaN halve it; 2 if left out"),
    used("fp16.consecutive_hysteresis", "a good step between them starts the count again"),
    used("fp16.min_loss_scale", "it is an error if half of that were needed; 1 if left out"),
    hint("fp16.fused_mode", BOOL, "always so"),
    refused(
        "fp16.fp16_master_weights_and_grads",
        note="masters are always float32; offload_optimizer or a higher stage makes room",
    ),
    used("torch_autocast.enabled", "float32 parameters and gradients; the forward runs under torch.autocast"),
    used("torch_autocast.dtype", '"bfloat16" (if left out) or "float16", with a scaled loss'),
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
    used(
        "data_types.grad_accum_dtype",
        "in which dtype gradients of micro batches are added up: fp32, or the model's; left out: fp32 at "
        "stages 2 and 3, where it costs 4/N bytes for each, and the model's at stages 0 and 1, where it "
        "would cost 4",
    ),
    used("data_types.buffer_dtype", "what floating-point buffers become; left out: they stay what they are"),
    used(
        "communication_data_type",
        "in which dtype gradients are averaged; left out: that of the parameters (gloo adds up in float32 "
        "all the same)",
    ),
    used("data_types.param_dtype", "must be what bf16.enabled or fp16.enabled set, and float32 without them"),
    used(
        "data_types.keep_in_fp32_modules",
        "patterns of the names of buffers that are float32 in a model of 16 bits, whatever buffer_dtype is; "
        "* stands for any characters. Left out: as a model of transformers lists; []: none",
    ),
)
