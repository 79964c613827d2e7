"""Tensors whose elements lie in memory at strides.

These can be copied, sent, hashed and written as bytes, and a view of a flat buffer can take their place.
Others are sparse, quantized or nested, of a class with operations of its own, or have no values.
"""

from __future__ import annotations

import io
from typing import TypeGuard

import torch
from torch import Tensor

_NO_OPERATIONS = Tensor.__torch_dispatch__  # a class that has it changes no operation


def is_strided(value: object) -> TypeGuard[Tensor]:
    """Return whether it is a tensor whose elements lie in memory at strides."""
    if not isinstance(value, Tensor) or _has_operations(value) or not torch._C._has_storage(value):
        return False
    with torch._C.DisableTorchFunctionSubclass():  # a class may refuse to describe itself
        if value.layout is not torch.strided or value.is_nested or value.is_quantized:
            return False
        return value.numel() == 0 or value.data_ptr() != 0


def kind_of(tensor: Tensor) -> str:
    """Return what a tensor is that is not strided: "a sparse tensor (torch.sparse_coo)", for example."""
    with torch._C.DisableTorchFunctionSubclass():
        if _has_operations(tensor):
            return f"a tensor of class {type(tensor).__name__}"
        if tensor.is_nested:
            return "a nested tensor"
        if tensor.is_quantized:
            return f"a quantized tensor ({tensor.dtype})"
        if tensor.layout is not torch.strided:
            return f"a {'tensor of mkldnn' if tensor.is_mkldnn else 'sparse tensor'} ({tensor.layout})"
        return "a tensor without memory"


def no_value(dtype: torch.dtype) -> float:
    """Return what stands where a value is elsewhere: NaN, or the largest integer."""
    return torch.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def bytes_of(tensor: Tensor) -> memoryview:
    """Return bytes that are equal for equal values: the elements in their order, of a tensor that is strided.

    Errors: what torch raises for a tensor that cannot be pickled
    """
    if not is_strided(tensor):
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        return buffer.getbuffer()
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    elements: memoryview = flat.view(torch.uint8).numpy().data
    return elements


def _has_operations(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not _NO_OPERATIONS
