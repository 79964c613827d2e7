"""Random numbers of forwards, the same in both runs: dropout is off, and all others come from seeds that the
number of the forward gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .dropout import turn_off

_SEED = 20_261_128  # any number; that of the forward is added


class SameNumbers:
    """Random numbers of one engine's forwards."""

    def __init__(self, module: nn.Module, *, place: int, device: torch.device) -> None:
        """Turn dropout off. Ranks of the same `place` draw the same numbers."""
        self._place, self._device = place, device
        self._dropout = turn_off()
        self._dropout.in_layers(module)
        self._num_forwards = 0
        self.are_drawn = False  # True once a forward has drawn any

    @property
    def dropped(self) -> list[float]:
        """Return the probabilities with which elements would have been dropped."""
        return sorted(self._dropout.probabilities)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Draw inside from a seed of the forward; afterwards the generators are as before it."""
        self._num_forwards += 1
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(_SEED + 1009 * self._num_forwards + self._place)
            before = self._states()
            yield
            after = self._states()
            if any(not torch.equal(one, other) for one, other in zip(before, after, strict=True)):
                self.are_drawn = True

    def _states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states
