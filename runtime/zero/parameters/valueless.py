"""Parameters that were made on the meta device: they have a shape and a dtype, and no values until a load.

Until an engine's flat buffers take them over they are one zero, as often as they have elements. So all that
is done to parameters before that works as for others, and takes no memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

_VALUELESS: Any = WeakTensorKeyDictionary()  # parameters, until they are taken over -> True


def is_valueless(param: Tensor) -> bool:
    """Whether the parameter waits for values."""
    return bool(_VALUELESS.get(param, False))


def leave_meta(param: nn.Parameter) -> None:
    """Let a parameter on the meta device be one zero; it stays the same object, with its attributes.

    Errors: RuntimeError if there are weak references to it
    """
    zero = torch.zeros((), dtype=param.dtype, device="cpu")
    other = nn.Parameter(zero.expand(param.shape), requires_grad=param.requires_grad)
    vars(other).update(vars(param))
    torch.utils.swap_tensors(param, other)  # type: ignore[no-untyped-call]
    _VALUELESS[param] = True


def note_memory(param: nn.Parameter) -> None:
    """Note that the parameter has memory of its own: zeros, and then what a load writes."""
    _VALUELESS.pop(param, None)
