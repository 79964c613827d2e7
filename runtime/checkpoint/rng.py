"""The random number generators of one rank."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def rng_state() -> dict[str, Any]:
    """Return the states of torch's, the GPU's, Python's and numpy's generators as plain data."""
    numpy = sys.modules.get("numpy")  # not imported: the program draws nothing from it
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": None,
    }
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def restore_rng_state(state: dict[str, Any]) -> None:
    """Continue the sequences of numbers from `state`, as far as this process has the generators."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    numpy = sys.modules.get("numpy")
    if state["numpy"] is not None and numpy is not None:
        numpy.random.set_state(state["numpy"])
