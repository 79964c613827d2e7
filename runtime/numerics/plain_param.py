"""Values of one parameter of a plain engine, for programs that use the functions which know shards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .plain_gradients import PlainGradients
from .plain_update import PlainUpdate

T = TypeVar("T")


class PlainParam:
    """See `ParamStandIn`. It keeps no engine alive."""

    def __init__(
        self,
        name: str,
        update: PlainUpdate,
        gradients: PlainGradients,
        *,
        is_counted: bool,
        divisor: Callable[[], float],
    ) -> None:
        """`divisor` is that of the sums of gradients, at present."""
        self.name, self._is_counted, self._divisor = name, is_counted, divisor
        self._update, self._gradients = weakref.ref(update), weakref.ref(gradients)

    def value(self) -> Tensor:
        return _alive(self._update).masters[self.name].detach().clone()

    def set_value(self, value: Tensor) -> None:
        _alive(self._update).set(self.name, value)

    @torch.no_grad()
    def spread(self, rank: int) -> None:
        param = _alive(self._update).params[self.name]
        written = param.detach().clone()
        dist.broadcast(written, src=rank)
        param.copy_(written)

    def gradient(self) -> Tensor:
        gradients = _alive(self._gradients)
        average = gradients.average(self.name, is_counted=self._is_counted, divisor=self._divisor())
        return average.to(torch.float32)

    def set_gradient(self, value: Tensor) -> None:
        _alive(self._gradients).set(self.name, value, is_counted=self._is_counted, divisor=self._divisor())

    def state(self, key: str) -> Tensor | None:
        found = _alive(self._update).state_of(self.name).get(key)
        return found.detach().clone() if isinstance(found, Tensor) else None

    def set_state(self, key: str, value: Tensor) -> None:
        found = _alive(self._update).state_of(self.name).get(key)
        if isinstance(found, Tensor):
            found.copy_(value)


def _alive(reference: weakref.ref[T]) -> T:
    found = reference()
    if found is None:
        raise AssertionError("a parameter is used whose engine has ended")
    return found
