"""A module's parameters, as its forward finds them: what brings a parameter that is not here, and what shows
a part of a divided one as the whole that the module computes with.

`module.weight` asks for a parameter by its name; `named_parameters()` and `state_dict()` do not, and get the
parameter as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from torch import nn

from ..parameters.freed_parameter import FreedParameter
from ..parameters.packed import is_packed, is_same_packed

Show = Callable[[Any], Any]  # maps a parameter to the value that the module sees


class ModuleParameters(dict[str, Any]):
    """The dictionary that replaces a module's `_parameters`."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__(params)
        self.unshard: Callable[[nn.Parameter], None] | None = None  # brings a parameter that is not here
        self.shows: dict[str, Show] = {}  # parameter name -> how it is shown
        self.keeps_packed = False  # another object for the same packed values replaces no parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return deepcopy(dict(self), memo)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def __setitem__(self, name: str, param: Any) -> None:
        if not (self.keeps_packed and is_same_packed(self.get(name), param)):
            super().__setitem__(name, param)

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if issubclass(type(param), FreedParameter) and self.unshard is not None:
            self.unshard(param)
        show = self.shows.get(name)
        return param if show is None or param is None else show(param)


def keep_packed(module: nn.Module) -> None:
    """Let the module and those below keep their packed parameters where a library makes new objects for
    them: PEFT's DoRA does in each forward on a CPU.
    """
    for submodule in module.modules():
        if any(param is not None and is_packed(param) for param in submodule._parameters.values()):
            parameters_of(submodule).keeps_packed = True


def parameters_of(module: nn.Module) -> ModuleParameters:
    """Replace the module's `_parameters`, unless done before, and return the replacement."""
    if not isinstance(module._parameters, ModuleParameters):
        module._parameters = ModuleParameters(module._parameters)
    return module._parameters


def plain_again(module: nn.Module) -> None:
    """Stop bringing parameters; those that are shown differently stay so."""
    params = module._parameters
    if isinstance(params, ModuleParameters):
        params.unshard, params.keeps_packed = None, False
        if not params.shows:
            module._parameters = dict(params)
