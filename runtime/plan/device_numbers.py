"""Numbers of GPUs in place of devices, as in `torch.zeros(1, device=rank)`: torch's compiled half would look
for a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _device

_DEVICE = torch.device
_LIKE = tuple(f"{name}_like" for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros"))
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


class _DeviceKind(type):
    """Makes torch's own devices, and knows them as its own."""

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        """Return a device; a number alone is a GPU."""
        if len(args) == 1 and not kwargs:
            args = (_device_of(args[0]),)
        return _DEVICE(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _DEVICE)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _DEVICE)


class PlannedDevice(metaclass=_DeviceKind):
    """The name of torch.device."""


# torch pickles a device by the name of its class
PlannedDevice.__module__, PlannedDevice.__name__, PlannedDevice.__qualname__ = "torch", "device", "device"


def take_device_numbers() -> None:
    """Have torch's class of devices and its functions that make tensors take numbers, in this process."""
    names: Any = torch
    makers = _device._device_constructors()  # torch keeps this list: `with torch.device()` knows them by it
    known = [name for name, value in vars(torch).items() if any(value is one for one in makers)]
    for name in (*_LIKE, *known):
        setattr(torch, name, _taking_numbers(getattr(torch, name)))
    kind: Any = Tensor
    for name in _METHODS:
        setattr(kind, name, _taking_numbers(getattr(kind, name)))
    names.device = PlannedDevice


def _taking_numbers(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _device_of(kwargs["device"])
        return plain(*args, **kwargs)

    return make


def _device_of(given: Any) -> Any:
    return _DEVICE("cuda", given) if isinstance(given, int) and not isinstance(given, bool) else given
