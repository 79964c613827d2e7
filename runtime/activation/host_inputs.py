"""Inputs that wait in host memory for the backward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from ..strided import is_strided


class HostCopy(NamedTuple):
    """An input that waits for the backward.

    On a CPU a copy is made too, so that the tensor's own memory can be freed.
    """

    values: Tensor  # in host memory, pinned where the device is a GPU
    device: torch.device
    copied: torch.cuda.Event | None  # recorded after the copy, for which the host does not wait


def to_host(tensor: Tensor, *, is_pinned: bool = True) -> Tensor | HostCopy:
    """Return a copy of the tensor in host memory; the tensor itself if it is not floating point or cannot be
    copied.
    """
    with torch._C.DisableTorchFunctionSubclass():  # a class may refuse to be copied
        if not is_strided(tensor) or not tensor.is_floating_point():
            return tensor
        # torch's pinned memory, though it rounds up to a power of two: the lengths of inputs vary with the
        # texts of each micro batch, and offload/pinned_memory.py would page-lock memory anew for each
        # length.
        is_pinned = is_pinned and tensor.is_cuda
        values = torch.empty_like(tensor, device="cpu", pin_memory=is_pinned)
        # The copy runs in the stream that computes: a program may change the tensor next, or free it.
        values.copy_(tensor, non_blocking=is_pinned)
        copied = torch.cuda.current_stream(tensor.device).record_event() if is_pinned else None
        return HostCopy(values, tensor.device, copied)


def to_device(saved: Tensor | HostCopy) -> Tensor:
    """Return the tensor that `to_host` took."""
    if isinstance(saved, HostCopy):
        if saved.copied is not None:
            saved.copied.wait()
        return saved.values.to(saved.device, non_blocking=True)
    return saved


def inputs_on_host() -> AbstractContextManager[object]:
    """Context in which autograd keeps floating-point tensors as copies in host memory."""
    return torch.autograd.graph.saved_tensors_hooks(to_host, to_device)
