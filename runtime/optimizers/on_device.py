"""Calls of dslaunch's CUDA kernels on torch's current stream, if they are available on this machine."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import cuda

SWITCH = "DSLAUNCH_CUDA_KERNELS"

_log = logging.getLogger("dslaunch")


def step_on_device(
    step: Callable[..., None], shards: Sequence[Any], *, device: torch.device, **options: Any
) -> bool:
    """Queue `step(shards, ...)`, one of `dslaunch.kernels.cuda`, on the current stream of `device`.

    Return False, with nothing written, if the kernels are not available: then torch's operations must do the
    step. The reason is logged once. The kernels are used only if DSLAUNCH_CUDA_KERNELS is 1, because they
    have not been tested on a device yet.
    """
    if os.environ.get(SWITCH) != "1":
        return False
    if torch.version.hip is not None:
        _warn_once("the kernels of dslaunch are for CUDA, and this torch is for ROCm")
        return False
    try:
        with torch.cuda.device(device):
            step(shards, stream=torch.cuda.current_stream(device).cuda_stream, **options)
    except cuda.CudaUnavailable as error:
        _warn_once(str(error))
        return False
    return True


def squared_norm_on_device(grads: Sequence[Tensor], *, device: torch.device) -> Tensor | None:
    """Return the sum of squares as a float64 scalar on the device, without waiting for it;
    None where step_on_device() returns False.
    """
    out = torch.empty(cuda.NORM_OUT_NUMEL, dtype=torch.float64, device=device)

    def squared_norm(grads: Sequence[Tensor], *, stream: int) -> None:
        cuda.squared_norm(grads, out=out, stream=stream)

    return out[0] if step_on_device(squared_norm, grads, device=device) else None


@functools.cache  # one warning for each message, however many shards there are
def _warn_once(message: str) -> None:
    _log.warning("torch's own kernels update the parameters: %s", message)


def as_float(value: Any) -> float:
    """Return a hyper-parameter as a number; torch allows a tensor for lr."""
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)


def scaled_grad(grad: Tensor, grad_scale: float) -> Tensor:
    """Return the gradient in float32, multiplied by `grad_scale`; may be the gradient itself, overwritten."""
    grad = grad.float()
    return grad if grad_scale == 1.0 else grad.mul_(grad_scale)
