"""Hooks that record the forward and backward of each unit as spans while steps are traced."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .spans import Spans


class TracedUnit(NamedTuple):
    """A unit, and the modules whose forward uses it."""

    name: str
    modules: tuple[nn.Module, ...]

    @property
    def tops(self) -> tuple[nn.Module, ...]:
        """Return the outermost modules of the unit."""
        inner = {id(below) for one in self.modules for below in one.modules() if below is not one}
        return tuple(one for one in self.modules if id(one) not in inner)


class UnitHooks:
    """Hooks on the modules from construction until `remove`, so that untraced steps have no hooks.

    The forward of a unit is that of its modules. Its backward begins when a gradient reaches an output of
    theirs, and ends when the next unit's backward begins, or with the whole backward.
    """

    def __init__(self, units: Sequence[TracedUnit], spans: Spans) -> None:
        self._spans = spans
        self._began: dict[int, int] = {}  # module -> begin
        self._in_backward: tuple[str, int] | None = None  # the unit's name, and when its backward began
        self._hooks = [
            hook
            for unit in units
            for module in unit.tops
            for hook in (
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(partial(self._leave, unit.name)),
            )
        ]

    def remove(self) -> None:
        """Leave the modules as they were."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.end_backward()

    def end_backward(self) -> None:
        """End the last unit's span: the backward has ended."""
        if self._in_backward is not None:
            name, began = self._in_backward
            self._spans.add("unit", f"backward of {name}", began)
            self._in_backward = None

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._began[id(module)] = time.monotonic_ns()

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        began = self._began.pop(id(module), 0)
        if not began:
            return
        is_again = torch._C._current_graph_task_id() != -1
        self._spans.add("unit", f"forward of {name}{', again' if is_again else ''}", began)
        if not torch.is_grad_enabled() or is_again:
            return
        first = next(
            (one for one in tree_leaves(output) if isinstance(one, Tensor) and one.requires_grad), None
        )
        if first is not None:
            first.register_hook(partial(self._reach, name))  # type: ignore[no-untyped-call]

    def _reach(self, name: str, grad: Tensor) -> None:
        if self._spans.is_on:
            self.end_backward()
            self._in_backward = name, time.monotonic_ns()
