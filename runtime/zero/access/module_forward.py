"""The forward of a module whose parameters an engine gathers, and the one that a copy of the module gets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from copy import deepcopy
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ..units.unit import Unit

Call = Callable[["ModuleForward", Any, Any], Any]
NOT_EXPORTED = (
    "a module whose parameters are sharded cannot be exported: export a plain one, as "
    "copy.deepcopy(model) inside dslaunch.zero.GatheredParameters(model.parameters()) makes it"
)


class ModuleForward:
    """A module's forward, inside `call` unless a forward of the module's unit is under way.

    It has the same signature. A program may have put it into a forward of its own, which lives longer.
    """

    # functools.wraps() copies __dict__ to a program's wrapper: no state of ours lies there.
    __slots__ = ("__dict__", "__weakref__", "_call", "_is_own", "_module", "_unit", "inner")

    def __init__(self, module: nn.Module, call: Call, unit: Unit) -> None:
        self._is_own = "forward" not in module.__dict__  # the class's own
        forward = module.forward
        functools.update_wrapper(self, forward)
        self.__wrapped__: Callable[..., Any] = forward
        self.inner: Callable[..., Any] = forward  # the forward, compiled or not
        self._module = module
        self._call: Call | None = call
        self._unit = unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is None or self._unit.num_forwards or torch.compiler.is_dynamo_compiling():
            return self.inner(*args, **kwargs)
        return self._call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"this forward has no {name}, for which torch.export and torch.jit.script() ask; {NOT_EXPORTED}"
        )

    def release(self) -> None:
        """Give the module back what it had, and do nothing any more where a program has kept this."""
        self._call, self.inner = None, self.__wrapped__
        if self._module.__dict__.get("forward") is not self:
            return
        if self._is_own:
            del self._module.__dict__["forward"]
        else:
            self._module.forward = self.__wrapped__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the forward of the copy, which is a plain module."""
        if self._is_own:
            copy = deepcopy(self._module, memo)
            return MethodType(type(copy).forward, copy)
        return _Rebinding(memo).copy(self.__wrapped__)

    def __reduce__(self) -> Any:
        if self._call is None:
            return _same, (self.__wrapped__,)
        raise ConfigError(
            "a module whose parameters are sharded over the ranks cannot be pickled; write "
            "engine.state_dict(), or use engine.save_checkpoint()"
        )


def _same(forward: Any) -> Any:
    return forward


class _Rebinding:
    """Copies a forward that was set on an instance for a copy of the module.

    copy.deepcopy() lets functions be what they are. One that has the module, or a part of it, in its closure
    or defaults would ask the original for values that are sharded again, so it gets the copy's.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo

    def copy(self, forward: Any) -> Any:
        """Return the forward for the copy."""
        return self._value(forward) if isinstance(forward, FunctionType) else deepcopy(forward, self._memo)

    def _has_copied(self, value: Any, seen: set[int]) -> bool:
        """Return whether any part of the value has been copied."""
        if id(value) in seen:
            return False
        seen.add(id(value))
        if isinstance(value, (nn.Module, Tensor)):
            return id(value) in self._memo
        return any(self._has_copied(one, seen) for one in _parts(value))

    def _value(self, value: Any) -> Any:
        """Return what the copy has in its place: the same object if nothing in it has been copied."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if not self._has_copied(value, set()):
            return value
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self._value(value.__self__))
        if isinstance(value, functools.partial):
            keywords = self._value(value.keywords)
            return functools.partial(self._value(value.func), *map(self._value, value.args), **keywords)
        if isinstance(value, dict):
            return {key: self._value(one) for key, one in value.items()}
        return type(value)(map(self._value, value))

    def _function(self, function: FunctionType) -> FunctionType:
        old = function.__closure__ or ()
        cells = tuple(CellType() if self._is_other(cell, function) else cell for cell in old)
        copy = FunctionType(
            function.__code__, function.__globals__, function.__name__, None, cells if old else None
        )
        self._memo[id(function)] = copy  # a function may be in its own closure
        for cell, before in zip(cells, old, strict=True):
            if cell is not before:
                cell.cell_contents = self._value(before.cell_contents)
        for name in functools.WRAPPER_ASSIGNMENTS:
            setattr(copy, name, getattr(function, name))
        copy.__dict__.update(self._value(function.__dict__))
        copy.__defaults__ = self._value(function.__defaults__)
        copy.__kwdefaults__ = self._value(function.__kwdefaults__)
        return copy

    def _is_other(self, cell: CellType, function: FunctionType) -> bool:
        """Return whether the copy needs another cell; in the same one both see what either writes."""
        return any(one is function or self._has_copied(one, set()) for one in _contents(cell))


def _contents(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # an empty cell: nothing was assigned yet
        return ()


def _parts(value: Any) -> Iterator[Any]:
    """Yield the objects to which a function, or a value inside it, refers."""
    if isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            yield from _contents(cell)
        yield from (value.__defaults__, value.__kwdefaults__, value.__dict__)
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif type(value) is dict:
        yield from value.values()
    elif type(value) in (tuple, list):
        yield from value
