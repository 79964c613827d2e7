"""Random numbers that differ between the ranks of a model-parallel group, kept apart from those that must be
equal on these ranks.
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
    """Named states of the device's random generator; without a GPU that is the CPU's.

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
        """Replace all states by these."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a sequence of random numbers of this name; the device's own sequence is left alone.

        Errors: ConfigError if there is a sequence of this name already
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
        """Inside, draw the device's random numbers from the state `name`, and let that state advance.

        Errors: ConfigError if there is no state of this name
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
    """Context in which the tracker has the states that it had when this object was made; may be entered
    often.
    """

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
    """Return the module that has `get_rng_state`, `set_rng_state` and `manual_seed` for this process's
    device.
    """
    return torch.cuda if torch.cuda.is_available() else torch.random
