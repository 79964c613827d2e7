"""Stand-in for `p.grad` while a rank has the average of its own shard only: it has the gradient's shape, and
raises an error when it is used.

It has no memory. Autograd, which would add a gradient to it, leaves that gradient here instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError

# Goes on after "p.grad of 'name' was used".
WHY_ABSENT = (
    "between the backward that ends a step and engine.step(): at this ZeRO stage each rank has then the "
    "average of its own shard only; call engine.allreduce_gradients() first, after which p.grad is the "
    "average, or dslaunch.zero.safe_get_full_grad() and safe_set_full_grad(); or run that backward in "
    "engine.no_sync(), after which p.grad is this rank's own sum, and the step averages"
)
_ADD_TO, _ADD = torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor


class AbsentGradient(Tensor):
    """Stand-in for the gradient of one parameter."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    param_name: str
    _added: Tensor | None

    @staticmethod
    def __new__(cls, name: str, like: Tensor) -> AbsentGradient:
        """Stand for the gradient of the parameter `name`, of the shape, dtype and device of `like`."""
        absent: AbsentGradient = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        absent.param_name, absent._added = name, None
        return absent

    def __init__(self, name: str, like: Tensor) -> None:
        """Do nothing: torch makes the tensor in `__new__`."""

    def take_added(self) -> Tensor | None:
        """Return what autograd has added since the last call, None if nothing."""
        added, self._added = self._added, None
        return added

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AbsentGradient('{self.param_name}', shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Keep a gradient that autograd adds; refuse all other operations.

        Errors: ConfigError with the parameter's name
        """
        first = args[0] if args else None
        if isinstance(first, cls) and torch._C._current_graph_task_id() != -1:
            if func is _ADD_TO:
                first._added = args[1]
                return first
            if func is _ADD:  # `func` is another operation in a backward that makes a graph
                return args[1]
        raise ConfigError(_refusal(args, kwargs or {}))


def _refusal(args: Iterable[Any], kwargs: dict[str, Any]) -> str:
    absent = _first_of((*args, *kwargs.values()))
    name = "a parameter" if absent is None else f"'{absent.param_name}'"
    return f"p.grad of {name} was used {WHY_ABSENT}"


def _first_of(values: Iterable[Any]) -> AbsentGradient | None:
    for value in values:
        if isinstance(value, AbsentGradient):
            return value
        if isinstance(value, (list, tuple)):
            absent = _first_of(value)
            if absent is not None:
                return absent
    return None
