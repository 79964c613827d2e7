"""Models made on the meta device: their parameters wait for a load, and their buffers are made here.

A file of weights has a model's parameters and persistent buffers. The other buffers are tables that a model
computes, such as the frequencies of rotary embeddings, and on the meta device they have no values either.
Models of transformers compute them again: from_pretrained() makes models on the meta device, too, and has the
method `_init_weights` write them. A table that no one computes again is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..checkpoint.files.manifest import digest
from ..errors import ConfigError
from ..pipeline.module import StagesModule
from ..zero.parameters.valueless import leave_meta

_INSTEAD = "make the model inside dslaunch.zero.Init(), or on a device"


def names_on_meta(module: nn.Module) -> tuple[str, ...]:
    """Return the parameters that are on the meta device."""
    return tuple(name for name, param in module.named_parameters() if _is_on_meta(param))


def said_of_meta(module: nn.Module) -> str:
    """Return a text that is the same on all ranks if they have the same parameters on the meta device."""
    names = names_on_meta(module)
    if not names:
        return "none"
    # stages hold other layers each
    return "some" if isinstance(module, StagesModule) else f"{len(names)}, {digest(repr(names).encode())}"


def take_from_meta(module: nn.Module, *, device: torch.device) -> frozenset[str]:
    """Let nothing of a model be on the meta device; return the names of parameters and buffers that have no
    values until they are loaded.

    Errors: ConfigError for what can have none
    """
    buffers = dict(_make_buffers(module, device))
    found = {name: param for name, param in module.named_parameters() if _is_on_meta(param)}
    for name, param in found.items():
        try:
            leave_meta(param)
        except RuntimeError as error:
            raise ConfigError(
                f"parameter '{name}' is on the meta device, and something else holds on to it ({error}); "
                f"{_INSTEAD}"
            ) from error
    return frozenset((*found, *buffers))


def _is_on_meta(param: nn.Parameter) -> bool:
    return param.is_meta and type(param) is nn.Parameter and not is_lazy(param)


def _make_buffers(module: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Give buffers memory, and values to those that no file has; yield the others."""
    made: dict[int, Tensor] = {}
    tables: dict[str, Tensor] = {}
    owners: list[nn.Module] = []
    for prefix, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is None or not buffer.is_meta or is_lazy(buffer):
                continue
            name = f"{prefix}.{key}" if prefix else key
            is_new = id(buffer) not in made
            owner._buffers[key] = made.setdefault(id(buffer), torch.zeros_like(buffer, device=device))
            if key not in owner._non_persistent_buffers_set:
                yield name, owner._buffers[key]
            elif is_new:
                tables[name] = owner._buffers[key]
                owners.append(owner)
    versions = {name: table._version for name, table in tables.items()}
    for owner in dict.fromkeys(owners):
        _compute_tables(module, owner)
    named = dict(module.named_buffers(remove_duplicate=False))
    for name, table in tables.items():
        if named[name] is table and table._version == versions[name]:
            raise ConfigError(
                f"buffer '{name}' was made on the meta device, without values, and no file has it: "
                f"{type(module).__name__} does not compute it again; {_INSTEAD}"
            )
    _check_attributes(module)


def _compute_tables(module: nn.Module, owner: nn.Module) -> None:
    """Let the model of transformers that has this module write to its buffers. Parameters, which are on the
    meta device still, stay without values.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return
    models: list[Any] = [
        one
        for one in module.modules()
        if isinstance(one, modeling.PreTrainedModel) and any(part is owner for part in one.modules())
    ]
    if models and not any(not param.is_meta for param in owner.parameters(recurse=False)):
        with torch.no_grad():
            models[-1]._init_weights(owner)  # that of the innermost model


def _check_attributes(module: nn.Module) -> None:
    """Errors: ConfigError for a tensor on the meta device that is no buffer"""
    for prefix, owner in module.named_modules():
        for key, value in vars(owner).items():
            if isinstance(value, Tensor) and value.is_meta:
                name = f"{prefix}.{key}" if prefix else key
                raise ConfigError(
                    f"'{name}' of the model is a tensor on the meta device, and neither a parameter nor a "
                    f"buffer, so nothing can give it values; {_INSTEAD}"
                )
