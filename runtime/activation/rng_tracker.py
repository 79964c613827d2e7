"""Random numbers that differ between the ranks of a model-parallel group,
beside those that must be equal there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError

DEFAULT_NAME = "model-parallel-rng"


class RngTracker:
    """Named states of this device's generator, which is the CPU's where there is no GPU.

    Source: DeepSpeed 0.19.8 runtime/activation_checkpointing/checkpointing.py,
            `CudaRNGStatesTracker`; the same methods
    """

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}  # never changed in place

    def reset(self) -> None:
        """Forget all states."""
        self._states = {}

    def get_states(self) -> dict[str, Tensor]:
        """Return the states in the form that `set_states` takes."""
        return dict(self._states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Go on from these states, and forget all others."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a sequence of random numbers; the device's own is left alone.

        Errors: ConfigError if there is one of this name
        """
        if name in self._states:
            raise ConfigError(
                f"random state '{name}' is there already; choose another name, or reset() first"
            )
        device = device_random()
        own = device.get_rng_state()
        device.manual_seed(seed)
        self._states[name] = device.get_rng_state()
        device.set_rng_state(own)

    @contextmanager
    def fork(self, name: str = DEFAULT_NAME) -> Iterator[None]:
        """Inside, the device's random numbers come from the state `name`, which moves on by them.

        Errors: ConfigError if there is none of this name
        """
        if name not in self._states:
            known = ", ".join(map(repr, self._states)) or "none"
            raise ConfigError(f"random state '{name}' was not added; there are: {known}")
        device = device_random()
        own = device.get_rng_state()
        device.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = device.get_rng_state()
            device.set_rng_state(own)


class RngReplay:
    """Inside, the tracker has the states of when this was made; may be entered again and again."""

    def __init__(self, tracker: RngTracker) -> None:
        self._tracker = tracker
        self._then = tracker.get_states()
        self._now: dict[str, Tensor] = {}

    def __enter__(self) -> None:
        self._now = self._tracker.get_states()
        self._tracker.set_states(self._then)

    def __exit__(self, *error: object) -> None:
        self._tracker.set_states(self._now)


def device_random() -> Any:
    """The module whose `get_rng_state`, `set_rng_state` and `manual_seed` are those of
    this process's device.
    """
    return torch.cuda if torch.cuda.is_available() else torch.random
