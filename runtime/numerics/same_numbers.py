"""Random numbers of forwards, the same in both runs: dropout is off, and all others come from seeds that the
number of the forward gives: torch's, numpy's, which masks of audio models come from, and Python's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

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
            pythons, numpys = random.getstate(), np.random.get_state()
            seed = _SEED + 1009 * self._num_forwards + self._place
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            before = self._states()
            try:
                yield
                self.are_drawn = self.are_drawn or self._states() != before
            finally:
                random.setstate(pythons)
                np.random.set_state(numpys)

    def _states(self) -> list[Any]:
        numpys: Any = np.random.get_state(legacy=False)["state"]
        states: list[Any] = [
            torch.get_rng_state().tolist(),
            random.getstate(),
            (bytes(numpys["key"]), numpys["pos"]),
        ]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device).tolist())
        return states
