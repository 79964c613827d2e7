"""Functions as ranges in the vendor's profiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from .current import get_accelerator

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


def instrument_w_nvtx(func: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """Have each call of the function shown as a range by its name; none inside of what
    torch.compile compiles.
    """

    @wraps(func)
    def ranged(*args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return ranged
