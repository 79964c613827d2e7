"""One seed for all generators."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dslaunch.runtime.checkpoint.training_state import restore_rng_state, rng_state
from dslaunch.runtime.compat.seed import set_random_seed


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    state = rng_state()
    yield
    restore_rng_state(state)


@pytest.mark.parametrize("seed", [0, 7, 2**31 + 9, 2**32 + 5, 2**64 + 3])
def test_every_generator_begins_with_the_seed(seed: int) -> None:
    set_random_seed(seed)
    found = (random.random(), np.random.rand(), torch.rand(1).item())
    random.seed(seed)
    torch.manual_seed(seed % 2**63)
    assert found == (
        random.random(),
        np.random.RandomState(seed % 2**32).rand(),
        torch.rand(1).item(),
    )
