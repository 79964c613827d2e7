"""Operations that other libraries have given torch, such as products with packed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch._library.fake_impl as shapes

from .guesses import Guesses

_OF_TORCH = frozenset(
    [
        "aten",
        "prim",
        "prims",
        "c10d",
        "_c10d_functional",
        "quantized",
        "mkldnn",
        "inductor",
        "higher_order",
        "profiler",
        "rngprims",
        "dslaunch",
    ]
)


class OtherLibraries:
    """Answers of a plan to them: their shapes are known, and nothing of what they do inside."""

    def __init__(self, guesses: Guesses) -> None:
        self._guesses = guesses

    def put(self) -> None:
        """Answer them, in this process, when they ask for a size that depends on values."""
        plain: Callable[[Callable[[], Any]], Any] = shapes.set_ctx_getter
        replaced: Any = shapes

        def set_ctx_getter(getter: Callable[[], Any]) -> Any:
            is_on_shapes = (
                getattr(getter, "__name__", "") == "error_on_ctx"
            )  # torch gives it to kernels for meta tensors
            return plain((lambda: self) if is_on_shapes else getter)

        replaced.set_ctx_getter = set_ctx_getter

    def new_dynamic_size(self, *, min: int = 0, max: int | None = None) -> int:
        """Return a size that only values tell: the largest, if the library names it, else the smallest."""
        size, which = (min, "smallest") if max is None else (max, "largest")
        self._guesses.note("the values of a tensor decide how large a result is", f"with the {which}, {size}")
        return size

    def ran(self, func: Any) -> None:
        """Note an operation."""
        if func.namespace not in _OF_TORCH:
            self._guesses.lines[f"the operations of {func.namespace}"] = (
                "no memory is counted that they take inside, beside their results"
            )
