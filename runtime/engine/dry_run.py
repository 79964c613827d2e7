"""Calls that write to tensors by copy_(), such as a module's load_state_dict(), tried without a write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class NoCopies(TorchFunctionMode):
    """Inside the `with` block of this thread, `a.copy_(b)` leaves `a` as it is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the called function, unless it is a copy."""
        if func is torch.Tensor.copy_:
            return args[0]
        return func(*args, **(kwargs or {}))
