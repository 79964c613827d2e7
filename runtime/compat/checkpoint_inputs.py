"""Inputs of checkpointed layers in host memory, for models that call torch's checkpoint() by themselves.

A model of transformers with `gradient_checkpointing_enable()` keeps of each layer its input alone. Inside the
context here these wait in host memory for the backward; all else that autograd keeps stays where it is.
Source: DeepSpeed 0.19.8 runtime/activation_checkpointing/offload_activations.py, the same names. There a
method of transformers is replaced meanwhile; here the saved tensor itself tells which code saves it.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from ..activation.host_inputs import HostCopy, to_device, to_host
from ..errors import ConfigError
from ..zero.access import access

_CHECKPOINTS = "torch.utils.checkpoint"
_BETWEEN = ("torch.autograd.function", access.__name__)


class _Kept:
    """One input: on its device until others have come, then in host memory."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value: Tensor | HostCopy = value


class CheckpointHiddenStatesOffload(torch.autograd.graph.saved_tensors_hooks):
    """While it is entered, what torch.utils.checkpoint keeps of its functions' inputs goes to host memory.

    It is for forwards; backwards may be inside or after it. `keep_last_count`: so many of the newest inputs
    stay on the device, for the backward wants them first. Inputs below `min_offload_bytes`, parameters and
    buffers stay as well. The other arguments are DeepSpeed's, for streams and pools of memory; torch's pinned
    memory serves here.
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
        super().__init__(self._pack, self._unpack)
        self.use_pin_memory, self.min_offload_bytes = use_pin_memory, min_offload_bytes
        self.keep_last_count = keep_last_count
        self.num_on_host = 0
        self._newest: deque[_Kept] = deque()

    def __enter__(self) -> CheckpointHiddenStatesOffload:  # type: ignore[override]
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._newest.clear()  # inputs on the device stay there

    def _pack(self, tensor: Tensor) -> Tensor | _Kept:
        if not self._is_moved(tensor):
            return tensor
        kept = _Kept(tensor)
        self._newest.append(kept)
        while len(self._newest) > self.keep_last_count:
            older = self._newest.popleft()
            if isinstance(older.value, Tensor):
                older.value = to_host(older.value, is_pinned=self.use_pin_memory)
                self.num_on_host += isinstance(older.value, HostCopy)
        return kept

    def _is_moved(self, tensor: Tensor) -> bool:
        if isinstance(tensor, nn.Parameter | nn.Buffer):
            return False
        return tensor.numel() * tensor.element_size() >= self.min_offload_bytes and _is_of_checkpoint()

    def _unpack(self, saved: Any) -> Tensor:
        return to_device(saved.value) if isinstance(saved, _Kept) else saved


def get_checkpoint_hidden_states_offloading_ctx_manager(**options: Any) -> CheckpointHiddenStatesOffload:
    """Return a context that moves inputs of checkpoints to host memory."""
    return CheckpointHiddenStatesOffload(**options)


def _is_of_checkpoint() -> bool:
    """Whether it is torch's checkpoint that saves: its own hooks take what the function inside saves."""
    frame = sys._getframe(3)  # frame of the code that saves the tensor
    while frame.f_back is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == _CHECKPOINTS
