"""Operations that torch puts together otherwise on a GPU than on shapes alone."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_LIBRARIES: list[Any] = []  # whose end would take the kernels away


def choose_by_device() -> None:
    """Have tensors without values take the way of the device that they are said to be on, in this process."""
    library: Any = torch.library.Library("aten", "IMPL", "AutogradMeta")  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of kernels that are replaced, as they should be
        library.impl(aten.dropout.default, _dropout, allow_override=True)


def _dropout(values: Tensor, p: float, train: bool) -> Tensor:
    """Drop with a mask of flags on a GPU.

    Source: torch's ATen/native/Dropout.cpp, is_fused_kernel_acceptable()
    """
    if values.is_cuda and train and 0 < p < 1 and values.numel():
        dropped: Tensor = aten.native_dropout.default(values, p, True)[0]
        return dropped
    plain: Tensor = aten.dropout.default.decompose(values, p, train)
    return plain
