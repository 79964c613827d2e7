"""Arguments of `engine.offload_states()`: which states, and where to.

Source: DeepSpeed 0.19.8 runtime/zero/offload_config.py, of the same names and values
"""

from __future__ import annotations

from enum import Enum


class OffloadDeviceEnum(str, Enum):
    """Places in which states may lie."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Kinds of states that an engine holds between steps.

    The names say "high" and "low precision": float32 and the model's dtype.
    """

    optim_states = "optim_states"  # Adam's moments, for example
    hp_params = "hp_params"  # float32 masters; nothing where the parameters are float32 themselves
    lp_params = "lp_params"  # the parameters, or this rank's shard of them
    lp_grads = "lp_grads"  # the gradients, or this rank's shard of them
    contiguous_grad_buffer = "contiguous_grad_buffer"  # has no effect: no such buffer outlives a backward
