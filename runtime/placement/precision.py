"""Dtypes in which a model is held and trained."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from ..config import Config
from ..config.keys.value import EIGHT_BITS
from ..errors import ConfigError
from ..optimizers.eight_bits import CODES
from .stage_policy import Placement, policy_for_stage

_log = logging.getLogger("dslaunch")

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    EIGHT_BITS: CODES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of a model's values. None keeps a dtype as it is. For `sums`, None means float32 if gradients
    are sharded, where it costs little, and the parameters' dtype otherwise.
    """

    parameters: torch.dtype | None = None
    buffers: torch.dtype | None = None
    sums: torch.dtype | None = None  # gradients, as they are added up over micro batches
    sent: torch.dtype | None = None  # gradients, as the ranks average them
    masters: torch.dtype = torch.float32  # what the optimizer updates; parameters of this dtype are their own
    # values that an optimizer keeps for each element; uint8: codes, see optimizers/eight_bits.py
    states: torch.dtype = torch.float32
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
    masters = _kept(config.bf16.bf16_master_weights_and_grads, names.master_dtype)
    return Precision(
        parameters=parameters,
        buffers=None if names.buffer_dtype is None else _DTYPES[names.buffer_dtype],
        sums=masters if sums is None and masters != torch.float32 else sums,
        sent=None if config.communication_data_type is None else _DTYPES[config.communication_data_type],
        masters=masters,
        states=_kept(config.bf16.bf16_optimizer_states, names.optimizer_state_dtype),
        kept=names.keep_in_fp32_modules,
    )


def _kept(is_bf16: bool, said: str | None) -> torch.dtype:
    """Return the dtype of values that are kept from step to step, from DeepSpeed's key and from ours."""
    return torch.bfloat16 if is_bf16 else _DTYPES[said or "fp32"]
