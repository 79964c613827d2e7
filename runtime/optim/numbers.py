"""Small conversions that every optimizer needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def as_float(value: Any) -> float:
    """Return a hyper-parameter as a number; torch allows a tensor for lr."""
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)


def scaled_grad(grad: Tensor, grad_scale: float) -> Tensor:
    """Return the gradient in float32, multiplied by `grad_scale`; may be the gradient itself, overwritten."""
    grad = grad.float()
    return grad if grad_scale == 1.0 else grad.mul_(grad_scale)
