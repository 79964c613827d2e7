"""A model that every rank has whole, with the values of rank 0."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..placement.precision import Precision
from ..zero.units.kept_buffers import kept_buffers


@torch.no_grad()
def place_whole(module: nn.Module, *, device: torch.device, precision: Precision) -> None:
    """Move the model to the device, in the dtypes that the ds_config asks for.

    Order: a collective
    """
    kept = {id(one) for one in kept_buffers(module, precision.kept, precision.parameters)}
    for param in module.parameters():
        dtype = precision.parameters if param.is_floating_point() else None
        param.data = param.data.to(device=device, dtype=dtype)
        _share(param.data)
    for buffer in module.buffers():
        dtype = precision.buffers if buffer.is_floating_point() else None
        buffer.data = buffer.data.to(device=device, dtype=torch.float32 if id(buffer) in kept else dtype)
        _share(buffer.data)


def _share(value: Tensor) -> None:
    """Take rank 0's value."""
    flat = value.contiguous().reshape(-1)
    if flat.numel():
        dist.broadcast(flat.view(torch.uint8), 0)
        value.copy_(flat.view(value.shape))
