"""One seed for all random numbers of a training program."""

from __future__ import annotations

import random
from importlib.util import find_spec

import torch


def set_random_seed(seed: int) -> None:
    """Seed Python's generator, torch's of all devices, and numpy's if it is installed,
    which takes the lower 32 bits.

    Source: DeepSpeed 0.19.8 runtime/utils.py, `set_random_seed`: the same seeds
    """
    random.seed(seed)
    torch.manual_seed(seed % 2**63)
    if find_spec("numpy") is not None:
        import numpy  # no other function needs it

        numpy.random.seed(seed % 2**32)
