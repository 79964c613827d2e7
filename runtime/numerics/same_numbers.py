"""Random numbers of forwards, the same in both runs: dropout is off, and all others come from seeds that the
place of the forward in the training gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

_DROPOUTS = {
    F.dropout: 1,
    F.alpha_dropout: 1,
    F.dropout1d: 1,
    F.dropout2d: 1,
    F.dropout3d: 1,
    F.feature_alpha_dropout: 1,
    torch.dropout: 1,
}  # function -> place of p among its arguments
_ATTENTION_P = 4  # place of dropout_p in scaled_dot_product_attention()
_SEED = 20_261_128  # any number; that of the forward is added


class _WithoutDropout(TorchFunctionMode):
    """Inside, functions that drop elements drop none."""

    def __init__(self) -> None:
        super().__init__()
        self.probabilities: set[float] = set()  # above 0, as they were asked for

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            args, kwargs = self._without(_DROPOUTS[func], "p", args, kwargs)
        elif func is F.scaled_dot_product_attention:
            args, kwargs = self._without(_ATTENTION_P, "dropout_p", args, kwargs)
        return func(*args, **kwargs)

    def _without(
        self, place: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = kwargs.get(name) if name in kwargs else args[place] if len(args) > place else None
        is_training = kwargs.get("training", args[2] if name == "p" and len(args) > 2 else True)
        if not given or not is_training:
            return args, kwargs
        self.probabilities.add(float(given))
        if name in kwargs:
            return args, {**kwargs, name: 0.0}
        return (*args[:place], 0.0, *args[place + 1 :]), kwargs


class SameNumbers:
    """Random numbers of one engine's forwards."""

    def __init__(self, module: nn.Module, *, place: int, device: torch.device) -> None:
        """Set the probabilities of the module's dropout layers to 0. Ranks of the same `place` draw the same
        numbers.
        """
        self._place, self._device = place, device
        self._mode = _WithoutDropout()
        self._num_forwards = 0
        self.are_drawn = False  # True once a forward has drawn any
        for one in module.modules():
            for name in ("p",) if isinstance(one, _DropoutNd) else ("dropout",):
                value = getattr(one, name, None)
                has_it = isinstance(one, _DropoutNd | nn.RNNBase | nn.MultiheadAttention)
                if has_it and isinstance(value, float) and value > 0.0:
                    self._mode.probabilities.add(value)
                    setattr(one, name, 0.0)

    @property
    def dropped(self) -> list[float]:
        """Return the probabilities with which elements would have been dropped."""
        return sorted(self._mode.probabilities)

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Drop nothing inside: for backwards, which may compute forwards again."""
        with self._mode:
            yield

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Draw inside from a seed of the forward; afterwards the generators are as before it."""
        self._num_forwards += 1
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), self._mode:
            torch.manual_seed(_SEED + 1009 * self._num_forwards + self._place)
            before = self._states()
            yield
            after = self._states()
            if any(not torch.equal(one, other) for one, other in zip(before, after, strict=True)):
                self.are_drawn = True

    def _states(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states
