"""Inputs of checkpointed layers in host memory, for models that call torch's checkpoint() by themselves.

A model of transformers with `gradient_checkpointing_enable()` keeps of each layer its input alone. Inside the
context here these wait in host memory for the backward; all else that autograd keeps stays where it is.
Source: DeepSpeed 0.19.8 runtime/activation_checkpointing/offload_activations.py, the same names. There a
method of transformers is replaced meanwhile; here the saved tensor itself tells which code saves it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ..activation.host_inputs import HostInputs, is_of_torchs_checkpoint
from ..errors import ConfigError


class CheckpointHiddenStatesOffload:
    """While it is entered, what torch.utils.checkpoint keeps of its functions' inputs goes to host memory.

    It is for forwards; backwards may be inside or after it. `keep_last_count`: of so many of the newest
    checkpoints the inputs stay on the device, for the backward wants them first. Inputs below
    `min_offload_bytes`, parameters and buffers stay as well. The other arguments are DeepSpeed's, for streams
    and pools of memory; torch's pinned memory serves here.
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_bytes: int = 1024,
        max_fwd_stash_count: int = 2,
        max_cpu_buffer_pool_count: int = 64,
        keep_last_count: int = 1,
    ) -> None:
        """Errors: ConfigError for a number below 0"""
        numbers = {
            "min_offload_bytes": min_offload_bytes,
            "max_fwd_stash_count": max_fwd_stash_count,
            "max_cpu_buffer_pool_count": max_cpu_buffer_pool_count,
            "keep_last_count": keep_last_count,
        }
        for name, number in numbers.items():
            if number < 0:
                raise ConfigError(f"{name} must be >= 0, got {number}")
        self.use_pin_memory, self.min_offload_bytes = use_pin_memory, min_offload_bytes
        self.keep_last_count = keep_last_count
        self._inputs = HostInputs(keep_last=keep_last_count, is_pinned=use_pin_memory)
        self._entered: list[AbstractContextManager[object]] = []

    @property
    def num_on_host(self) -> int:
        """Number of inputs that went to host memory so far."""
        return self._inputs.num_sent

    def __enter__(self) -> CheckpointHiddenStatesOffload:
        self._inputs.begin_forward()
        self._entered.append(self._inputs.hooks(self._is_moved))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._entered.pop().__exit__(*args)

    def _is_moved(self, tensor: Tensor) -> bool:
        num_bytes = tensor.numel() * tensor.element_size()
        return num_bytes >= self.min_offload_bytes and is_of_torchs_checkpoint(tensor)


def get_checkpoint_hidden_states_offloading_ctx_manager(**options: Any) -> CheckpointHiddenStatesOffload:
    """Return a context that moves inputs of checkpoints to host memory."""
    return CheckpointHiddenStatesOffload(**options)
