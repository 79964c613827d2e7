"""Tensors inside lists, tuples and dicts, themselves inside others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def map_nested(function: Callable[[Any], Any], item: Any) -> Any:
    """Return `item` with everything in it that is no list, tuple or dict replaced; those keep their types.

    A dict keeps its attributes, too, such as the versions that a state_dict has.
    """
    if isinstance(item, dict):
        mapped = copy.copy(item)
        mapped.update({key: map_nested(function, value) for key, value in item.items()})
        return mapped
    if isinstance(item, list):
        return [map_nested(function, value) for value in item]
    if isinstance(item, tuple):
        values = [map_nested(function, value) for value in item]
        return type(item)(*values) if hasattr(item, "_fields") else tuple(values)
    return function(item)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = torch.device("cpu")) -> Any:  # noqa: B008  (DeepSpeed's)
    """Return `item` with copies of its tensors on the device.

    A copy has memory for its own elements alone: torch.save would write the whole memory that a view is of.
    Of tied tensors each gets a copy.
    """
    target = torch.device(device)

    def cloned(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.detach()
        return value.clone() if value.device == target else value.to(target)

    return map_nested(cloned, item)


def copy_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool]) -> Any:
    """Return `item` with everything that `criterion_func` is true of sent to the device."""
    return map_nested(lambda value: value.to(device) if criterion_func(value) else value, item)


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Return `item` with everything sent to the device; a tensor that `criterion_func` is true of
    stays the same object.
    """

    def moved(value: Any) -> Any:
        sent = value.to(device)
        if criterion_func is None or not criterion_func(value):
            return sent
        value.data = sent.data
        return value

    return map_nested(moved, item)


def get_tensor_bytes(item: Any) -> int:
    """Return the bytes of all elements of all tensors in it, without what else their memory holds."""
    total = 0

    def count(value: Any) -> None:
        nonlocal total
        total += value.numel() * value.element_size() if isinstance(value, Tensor) else 0

    map_nested(count, item)
    return total
