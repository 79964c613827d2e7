"""Where a list of layers is cut: as DeepSpeed 0.19.8 does."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.pipeline.cutting import cut, cut_balanced, cut_uniformly

# What DeepSpeed 0.19.8's partition_uniform() and partition_balanced() return.
UNIFORM = {
    (10, 4): [0, 3, 6, 8, 10],
    (3, 4): [0, 1, 2, 3, 3],
    (8, 4): [0, 2, 4, 6, 8],
    (7, 3): [0, 3, 5, 7],
}
BALANCED = {
    ((1, 1, 1, 1, 5, 1, 1), 3): [0, 4, 5, 7],
    ((10, 1, 1, 1, 1, 10), 2): [0, 3, 6],
    ((0, 0, 1, 0, 1, 0, 0, 1), 2): [0, 7, 8],
    ((0, 0, 0, 0), 2): [0, 3, 4],
    ((5, 5), 3): [0, 1, 2, 2],
    ((1520, 16, 16, 16, 16, 16, 1500), 4): [0, 1, 4, 6, 7],
    ((0, 1, 1, 0, 1, 0), 3): [0, 2, 4, 6],
}


def test_the_cuts_are_deepspeeds() -> None:
    for (num_layers, num_parts), bounds in UNIFORM.items():
        assert cut_uniformly(num_layers, num_parts) == bounds
    for (weights, num_parts), bounds in BALANCED.items():
        assert cut_balanced(weights, num_parts) == bounds, weights


@given(st.lists(st.integers(0, 50), min_size=1, max_size=14), st.integers(1, 6))
def test_every_layer_is_in_one_part_and_no_other_cut_is_more_even(weights: list[int], num_parts: int) -> None:
    bounds = cut_balanced(weights, num_parts)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(weights), num_parts + 1)
    assert bounds == sorted(bounds)
    if num_parts == 2 and len(weights) > 2:
        spread = [abs(sum(weights[:k]) - sum(weights[k:])) for k in range(1, len(weights))]
        assert abs(sum(weights[: bounds[1]]) - sum(weights[bounds[1] :])) == min(spread)


def test_methods_are_told_by_name() -> None:
    names = ["Embedding", "Block", "Block", "function", "Block", "Head"]
    assert cut("uniform", num_parts=2, names=names) == [0, 3, 6]
    assert cut("Parameters", num_parts=2, names=names, num_trained=[9, 1, 1, 0, 1, 1]) == [0, 1, 6]
    assert cut("type:block", num_parts=3, names=names) == [0, 2, 4, 6]
    with pytest.raises(ConfigError, match="'best' is not available; there are 'uniform', 'parameters' and"):
        cut("best", num_parts=2, names=names)
    with pytest.raises(ConfigError, match="no layer's class has such a name; there are Block, Embedding"):
        cut("type:transformer", num_parts=2, names=names)
    with pytest.raises(ConfigError, match=r"'type:\(': is no regular expression"):
        cut("type:(", num_parts=2, names=names)
