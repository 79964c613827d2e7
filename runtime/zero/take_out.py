"""Parameters that are plain again, with values from elsewhere; an engine or zero.Init that had them ends."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .model.sharded_model import ShardedModel
from .param_location import location_of
from .parameters.early_parameter import early_of
from .parameters.freed_parameter import give_values


def engines_of(module: nn.Module) -> tuple[ShardedModel, ...]:
    """Return the models of the engines that have parameters of this module."""
    locations = map(location_of, module.parameters())
    return tuple(dict.fromkeys(location.model for location in locations if location is not None))


def is_kept(param: Tensor) -> bool:
    """True if an engine or zero.Init has the parameter."""
    return early_of(param) is not None or location_of(param) is not None


def is_sharded(param: Tensor) -> bool:
    """True if the parameter's values would be lost with the object that has it."""
    early, location = early_of(param), location_of(param)
    is_away = location is not None and location.sub_buffer.is_sharded
    return is_away or (early is not None and not early.is_whole)


@torch.no_grad()
def take_out(values: Mapping[nn.Parameter, Tensor], *, by: str) -> None:
    """Let these be plain parameters with these values, of the same shapes, and end the engines that have
    them; `by` says what does it. Not a collective.

    Order: the values of other parameters that are sharded by these engines are lost
    """
    locations = map(location_of, values)
    models = dict.fromkeys(location.model for location in locations if location is not None)
    for model in models:
        model.take_out(by)
    for param, value in values.items():
        early = early_of(param)
        if early is not None:
            early.forget()
        param.grad = None
        give_values(param, value)
    for model in models:
        end = model.on_taken()
        if end is not None:
            end()
