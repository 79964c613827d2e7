"""Modules that are gathered as one, whatever is inside: mixtures of experts,
where each rank may use other ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn

from ...config.zero import LeafModuleConfig

_EXPERTS = tuple(
    f"transformers.models.{family}.modeling_{family}.{name}SparseMoeBlock"
    for family, name in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
)
"""Classes that are marked where the ds_config's leaf_module leaves `classes` out, as in DeepSpeed."""
_MARKED: weakref.WeakSet[nn.Module] = weakref.WeakSet()

Class = type[nn.Module] | str  # a class, or its name with or without its module


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[Class], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Have every module of these classes gathered as one at stage 3; returns them.

    Call it before `initialize()`.

    Errors: ValueError if the model has none, with `raise_if_not_found`
    Source: DeepSpeed 0.19.8 utils/z3_leaf_module.py, as all here
    """
    return _mark(_of_classes(model, leaf_module_classes, raise_if_not_found), is_leaf=True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[Class], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Unmark the modules of these classes; return them.

    Errors: ValueError if the model has none, with `raise_if_not_found`
    """
    return _mark(_of_classes(model, leaf_module_classes, raise_if_not_found), is_leaf=False)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules that named_modules() has by these names, or undo it; returns them,
    and the names that it has not.

    Errors: ValueError if there are such names, with `raise_if_not_found`
    """
    modules = dict(model.named_modules())
    missing = [name for name in module_names if name not in modules]
    _check_found(missing, "name", raise_if_not_found)
    return _mark([modules[name] for name in module_names if name in modules], is_leaf=flag), missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end so, or undo it; returns them, and the suffixes that no name has.

    Errors: ValueError if there are such suffixes, with `raise_if_not_found`
    """
    modules = dict(model.named_modules())
    missing = [end for end in module_name_suffixes if not any(name.endswith(end) for name in modules)]
    _check_found(missing, "suffix", raise_if_not_found)
    # Keep the order of the suffixes, and each name once.
    names = {name: None for end in module_name_suffixes for name in modules if name.endswith(end)}
    return _mark([modules[name] for name in names], is_leaf=flag), missing


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark this module, or unmark it."""
    _mark([model], is_leaf=flag)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module is marked."""
    return model in _MARKED


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are marked."""
    return [one for one in model.modules() if one in _MARKED]


def mark_configured(model: nn.Module, config: LeafModuleConfig) -> None:
    """Mark the modules that the ds_config names; where it names no classes,
    the blocks of experts in `_EXPERTS`.
    """
    classes = config.classes if "classes" in config.model_fields_set else _EXPERTS
    _MARKED.update(
        module
        for name, module in model.named_modules()
        if name in config.names
        or any(name.endswith(suffix) for suffix in config.name_suffixes)
        or not _names_of(type(module)).isdisjoint(classes)
    )


def _mark(modules: list[nn.Module], *, is_leaf: bool) -> list[nn.Module]:
    if is_leaf:
        _MARKED.update(modules)
    else:
        _MARKED.difference_update(modules)
    return modules


def _check_found(missing: Sequence[str], what: str, raise_if_not_found: bool) -> None:
    if missing and raise_if_not_found:
        raise ValueError(
            f"the model has no module with the {what} {', '.join(missing)}; see model.named_modules()"
        )


def _of_classes(model: nn.Module, classes: Sequence[Class], raise_if_not_found: bool) -> list[nn.Module]:
    modules = [
        one
        for one in model.modules()
        if any(
            _names_of(type(one)) & {kind} if isinstance(kind, str) else isinstance(one, kind)
            for kind in classes
        )
    ]
    if not modules and raise_if_not_found:
        raise ValueError(f"the model has no module of {', '.join(map(str, classes))}")
    return modules


def _names_of(kind: type) -> set[str]:
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
