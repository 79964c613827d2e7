"""Dtypes in which a model is held and trained."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from ..config import Config
from ..errors import ConfigError
from .stage_policy import Placement, policy_for_stage

_log = logging.getLogger("dslaunch")

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of a model's values. None keeps a dtype as it is. For `sums`, None means float32 if gradients
    are sharded, where it costs little, and the parameters' dtype otherwise.
    """

    parameters: torch.dtype | None = None
    buffers: torch.dtype | None = None
    sums: torch.dtype | None = None  # gradients, as they are added up over micro batches
    sent: torch.dtype | None = None  # gradients, as the ranks average them
    # patterns of names of buffers that stay float32; None: the model's own list
    kept: tuple[str, ...] | None = None


def precision_of(config: Config) -> Precision:
    """Return the dtypes of the ds_config.

    Where gradients are not sharded they are added up in the dtype of the model, or in float32.
    Errors: ConfigError for another dtype of these sums; at stage 1 only a warning, if the program was
    written for DeepSpeed
    """
    parameters: torch.dtype | None = None
    if config.fp16.enabled or config.bf16.enabled:
        parameters = torch.float16 if config.fp16.enabled else torch.bfloat16
    names = config.data_types
    sums = None if names.grad_accum_dtype is None else _DTYPES[names.grad_accum_dtype]
    model = parameters or torch.float32
    policy = policy_for_stage(config.zero.stage)
    if sums not in (None, torch.float32, model) and policy.gradients is not Placement.SHARDED:
        if not (config.origin.is_lenient and policy.is_sharded):
            raise ConfigError(
                f"data_types.grad_accum_dtype {sums} is neither float32 nor the model's dtype, {model}; at "
                f"stage {policy.stage} write one of these"
            )
        _log.warning(
            "data_types.grad_accum_dtype %s is not done at stage %d: gradients are added up in %s",
            sums,
            policy.stage,
            model,
        )
        sums = None
    return Precision(
        parameters=parameters,
        buffers=None if names.buffer_dtype is None else _DTYPES[names.buffer_dtype],
        sums=sums,
        kept=names.keep_in_fp32_modules,
        sent=None if config.communication_data_type is None else _DTYPES[config.communication_data_type],
    )
