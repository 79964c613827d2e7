"""Two names by which callers keep zero.Init from changing the dtype of what a model
computes while it is made.

zero.Init here replaces none of torch's functions, so there is nothing to keep it from;
a call of these gives what they say.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype, target_device: torch.device | str | None = None
) -> Callable[..., Tensor]:
    """Return `fn` with floating-point results in `target_fp_dtype`, on `target_device` where the
    caller names none.

    Source: DeepSpeed 0.19.8 runtime/zero/partition_parameters.py, which changes the dtype the same way
    """

    def construct(*args: object, **kwargs: object) -> Tensor:
        if kwargs.get("device") is None and target_device is not None:
            kwargs["device"] = target_device
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if tensor.is_floating_point() else tensor

    return construct
