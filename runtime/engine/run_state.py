"""The state that a forward begins with, beside weights and inputs: so that it can be run again."""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class RandomState(NamedTuple):
    """States of the generators that a module may draw from."""

    cpu: Tensor  # state of torch's generator there
    device: Tensor | None  # state of the GPU's generator
    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Return the present states."""
        of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        numpy = sys.modules.get("numpy")  # not imported: then the module draws no numbers from it
        state = None if numpy is None else numpy.random.get_state()
        return cls(torch.get_rng_state(), of_device, random.getstate(), state)

    def restore(self, device: torch.device) -> None:
        """Have all generators go on from here."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


class _Slot(NamedTuple):
    """A buffer in its module."""

    place: dict[str, Any]  # the module's own buffers
    name: str
    buffer: Tensor
    version: int
    copy: Tensor | None

    @property
    def is_written(self) -> bool:
        """Tell whether its values were changed where they are."""
        return _version(self.buffer) != self.version


class BufferStates:
    """Buffers at a moment. One that is replaced later is still here; of one that is written to later there
    has to be a copy.
    """

    def __init__(self, module: nn.Module, copied: set[int] | None = None) -> None:
        """`copied` has the buffers, by id(), whose values are copied; None: those of all are."""
        self._slots = [
            _Slot(
                one._buffers,
                name,
                buffer,
                _version(buffer),
                buffer.clone() if copied is None or id(buffer) in copied else None,
            )
            for one in module.modules()
            for name, buffer in one._buffers.items()
            if buffer is not None
        ]

    def written(self) -> set[int]:
        """Return the buffers, by id(), that were written to since."""
        return {id(one.buffer) for one in self._slots if one.is_written}

    def are_known(self) -> bool:
        """Tell whether all that was written to since has a copy."""
        return all(one.copy is not None or not one.is_written for one in self._slots)

    @torch.no_grad()
    def restore(self) -> None:
        """Let the buffers be as they were."""
        for one in self._slots:
            one.place[one.name] = one.buffer
            if one.copy is not None:
                one.buffer.copy_(one.copy)


class Inputs:
    """Arguments of a forward."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        leaves = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        self._versions = [(one, _version(one)) for one in leaves]

    def are_the_same(self) -> bool:
        """Tell whether no tensor was written to since."""
        return all(_version(one) == version for one, version in self._versions)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
