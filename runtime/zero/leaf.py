"""Modules that are gathered as one, whatever is inside: mixtures of experts, where each rank may use other ones."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn

from ..config.zero import LeafModuleConfig

_MARKED: weakref.WeakSet[nn.Module] = weakref.WeakSet()

Class = type[nn.Module] | str  # a class, or its name with or without its module


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[Class]) -> list[nn.Module]:
    """Have every module of these classes gathered as one at stage 3; returns them. Call it before `initialize()`.

    Errors: ValueError if the model has none
    Source: DeepSpeed 0.19.8 utils/z3_leaf_module.py
    """
    found = _of_classes(model, leaf_module_classes)
    if not found:
        raise ValueError(f"the model has no module of {', '.join(map(str, leaf_module_classes))}")
    _MARKED.update(found)
    return found


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[Class]) -> list[nn.Module]:
    """Undo set_z3_leaf_modules() for these classes; returns the modules."""
    found = [one for one in _of_classes(model, leaf_module_classes) if one in _MARKED]
    _MARKED.difference_update(found)
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are marked."""
    return [one for one in model.modules() if one in _MARKED]


def is_leaf(name: str, module: nn.Module, config: LeafModuleConfig) -> bool:
    """Whether this module is marked, or named in the ds_config."""
    return (
        module in _MARKED
        or name in config.names
        or any(name.endswith(suffix) for suffix in config.name_suffixes)
        or not _names_of(type(module)).isdisjoint(config.classes)
    )


def _of_classes(model: nn.Module, classes: Sequence[Class]) -> list[nn.Module]:
    return [
        one
        for one in model.modules()
        if any(
            _names_of(type(one)) & {kind} if isinstance(kind, str) else isinstance(one, kind)
            for kind in classes
        )
    ]


def _names_of(kind: type) -> set[str]:
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
