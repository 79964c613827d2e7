"""Keys of DeepSpeed's config for inference: used, without effect and told, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from ...errors import ConfigError
from ...inference.options import InferenceOptions
from ...mesh.mpu import read_mpu
from .checkpoint_folder import checkpoint_folder
from .config import DeepSpeedInferenceConfig, DeepSpeedTPConfig
from .injection_policy import rules_of_policy

_OF_KERNELS = "it is for DeepSpeed's kernels"
_NO_EFFECT = {  # keys without effect unless they have their default
    "triton_autotune": _OF_KERNELS,
    "triangular_masking": _OF_KERNELS,
    "return_tuple": _OF_KERNELS,
    "transposed_mode": _OF_KERNELS,
    "injection_policy_tuple": "injection_policy says it",
    "config": "the model has its own",
    "training_mp_size": "a checkpoint is read by any number of ranks",
    "set_empty_params": "a model on the meta device is noticed",
    "replace_method": "it is old",
}


def read_options(
    config: DeepSpeedInferenceConfig, model: nn.Module, *, given: Mapping[str, Any], is_lenient: bool
) -> InferenceOptions:
    """Return what the config asks for; `given` are the keys that the program has written.

    Errors: ConfigError for what is refused
    """
    _refuse_experts(config)
    notes = [
        f"{key}: no effect, {why}"
        for key, why in _NO_EFFECT.items()
        if getattr(config, key) != DeepSpeedInferenceConfig.model_fields[key].default
    ]
    if config.quant:
        notes.append("quant: no effect, it is for int8")
    zero = config.zero
    if zero.get("stage") in (1, 2):
        zero = {}
        notes.append("zero: no effect, its stage shards what only training has")
    tensor = config.tensor_parallel
    tp_size = _tp_size(tensor)
    offload = config.offload
    if config.keep_module_on_host and offload is None and not zero:
        offload = "cpu"
        notes.append('keep_module_on_host: offload="cpu", weights stream from host memory')
    rules: tuple[Mapping[str, Any], ...] = ()
    if tensor.partition_config is not None:
        rules = tuple(tensor.partition_config.get("layer_specs", ()))
    elif config.injection_policy is not None:
        rules, note = rules_of_policy(config.injection_policy, model, tp_size=tp_size)
        notes += [note] if note else []
    says_length = bool({"max_out_tokens", "max_tokens"} & given.keys())
    return InferenceOptions(
        dtype=config.dtype if "dtype" in given or is_lenient else None,
        tp_size=tp_size,
        tp_group=tensor.tp_group,
        mpu=tensor.mpu,
        layer_rules=rules,
        offload=offload,
        nvme_path=config.nvme_path,
        zero=zero,
        checkpoint=checkpoint_folder(config),
        save_path=config.save_mp_checkpoint_path or config.checkpoint_config.save_mp_checkpoint_path,
        max_tokens=config.max_out_tokens if says_length or is_lenient else None,
        min_tokens=config.min_out_tokens,
        kernels=config.replace_with_kernel_inject,
        graphs=config.enable_cuda_graph,
        compiles=config.use_triton,
        notes=tuple(notes),
        is_lenient=is_lenient,
    )


def _tp_size(tensor: DeepSpeedTPConfig) -> int:
    if not tensor.enabled:
        return 1
    if tensor.mpu is not None:
        return read_mpu(tensor.mpu).tp
    if tensor.tp_group is not None:
        group: Any = tensor.tp_group
        return int(dist.get_world_size(group=group))
    return tensor.tp_size


def _refuse_experts(config: DeepSpeedInferenceConfig) -> None:
    moe = config.moe
    groups = [name for name in ("ep_group", "ep_mp_group") if getattr(moe, name) is not None]
    if moe.ep_size == 1 and not groups:
        return
    key = f"moe.ep_size={moe.ep_size}" if moe.ep_size != 1 else f"moe.{groups[0]}"
    raise ConfigError(
        f"init_inference({key}): experts on different ranks do not generate, because ranks would have to "
        "answer in step; give tensor_parallel.tp_size, which divides each expert over ranks, or "
        'offload="cpu", which shares all weights'
    )
