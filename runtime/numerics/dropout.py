"""Dropout that is off: torch's functions that drop elements, and layers that do so, drop none.

The functions are replaced where torch's layers and programs look them up, in torch.nn.functional. A
TorchFunctionMode would not do: a layer that a backward computes again knows nothing of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

_FUNCTIONS = {
    **dict.fromkeys(
        ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"), "p"
    ),
    "scaled_dot_product_attention": "dropout_p",
}  # name -> the argument that is the probability
_ATTENTION_P = 4  # place of dropout_p, which has no signature
_DEFAULT_P = 0.5


class DropoutOff:
    """Dropout is off in this process from its making on, until `restore`."""

    def __init__(self) -> None:
        self.probabilities: set[float] = set()  # above 0, as they were asked for
        self._originals: dict[str, Callable[..., Any]] = {}
        for name, argument in _FUNCTIONS.items():
            original = getattr(F, name)
            self._originals[name] = original
            setattr(F, name, self._without(original, argument))

    def in_layers(self, module: nn.Module) -> None:
        """Set the probabilities of layers that do not call these functions, too, to 0."""
        for one in module.modules():
            is_dropout = isinstance(one, _DropoutNd)
            name = "p" if is_dropout else "dropout"
            value = getattr(one, name, None)
            has_it = is_dropout or isinstance(one, nn.RNNBase | nn.MultiheadAttention)
            if has_it and isinstance(value, float) and value > 0.0:
                self.probabilities.add(value)
                setattr(one, name, 0.0)

    def restore(self) -> None:
        """Put torch's functions back."""
        for name, original in self._originals.items():
            setattr(F, name, original)

    def _without(self, original: Callable[..., Any], argument: str) -> Callable[..., Any]:
        is_attention = argument == "dropout_p"
        place = _ATTENTION_P if is_attention else list(inspect.signature(original).parameters).index(argument)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            default = 0.0 if is_attention else _DEFAULT_P
            given = kwargs.get(argument, args[place] if len(args) > place else default)
            is_training = kwargs.get("training", args[place + 1] if len(args) > place + 1 else True)
            if not given or not (is_attention or is_training):
                return original(*args, **kwargs)
            self.probabilities.add(float(given))
            if len(args) > place:
                return original(*args[:place], 0.0, *args[place + 1 :], **kwargs)
            return original(*args, **{**kwargs, argument: 0.0})

        return call


_off: list[DropoutOff] = []  # what this process has under way: at most one


def turn_off() -> DropoutOff:
    """Turn dropout off, if it is not; return what has done so."""
    if not _off:
        _off.append(DropoutOff())
    return _off[0]


def turn_on() -> None:
    """Let torch's functions be as they were."""
    while _off:
        _off.pop().restore()
