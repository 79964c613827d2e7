"""Cuts of a list of layers into parts: numbers only.

A cut is a list of bounds: part i has the layers from bounds[i] to bounds[i + 1].

Source: DeepSpeed 0.19.8 runtime/utils.py, `partition_uniform` and `partition_balanced`: the same cuts
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from ..errors import ConfigError

UNIFORM, PARAMETERS, BY_TYPE = "uniform", "parameters", "type:"


def cut(
    method: str, *, num_parts: int, names: Sequence[str], num_trained: Sequence[int] | None = None
) -> list[int]:
    """Return the bounds of so many parts. `names` are the layers' class names, or for functions their own
    names. `num_trained` are the trained elements of each layer, for the method "parameters".

    Errors: ConfigError for an unknown method, or a type that no layer has
    """
    wanted = method.lower()
    if wanted == UNIFORM:
        return cut_uniformly(len(names), num_parts)
    if wanted == PARAMETERS:
        if num_trained is None:
            raise AssertionError("the layers' parameters were not counted")
        return cut_balanced(num_trained, num_parts)
    if not wanted.startswith(BY_TYPE):
        raise ConfigError(
            f"partition_method {method!r} is not available; there are {UNIFORM!r}, {PARAMETERS!r} and "
            "'type:REGEX', which spreads the layers whose class has such a name"
        )
    pattern = method[len(BY_TYPE) :]
    try:
        hits = [re.search(pattern, name, re.IGNORECASE) is not None for name in names]
    except re.error as error:
        raise ConfigError(f"partition_method {method!r}: is no regular expression: {error}") from error
    if not any(hits):
        raise ConfigError(
            f"partition_method {method!r}: no layer's class has such a name; there are "
            f"{', '.join(sorted(set(names)))}"
        )
    return cut_balanced([int(hit) for hit in hits], num_parts)


def cut_uniformly(num_layers: int, num_parts: int) -> list[int]:
    """Return bounds of parts of the same length. If there is a remainder, the first parts are one layer
    longer; with fewer layers than parts, the last parts are empty.
    """
    if num_layers <= num_parts:
        return [min(part, num_layers) for part in range(num_parts + 1)]
    length, longer = divmod(num_layers, num_parts)
    return [part * length + min(part, longer) for part in range(num_parts + 1)]


def cut_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the bounds for which the heaviest and the lightest part differ least; of several such cuts, the
    cut whose last parts begin latest.
    """
    num_layers = len(weights)
    if num_layers <= num_parts:
        return cut_uniformly(num_layers, num_parts)
    ends = [0.0, *accumulate(map(float, weights))]
    # By the number of first layers: the heaviest and the lightest part when these are cut into so many parts.
    best: list[tuple[float, float]] = [(0.0, inf), *[(inf, inf)] * num_layers]
    starts: list[list[int]] = []  # part -> its start, by its end
    for part in range(1, num_parts + 1):
        longer: list[tuple[float, float]] = [(inf, inf)] * (num_layers + 1)
        chosen = [0] * (num_layers + 1)
        for end in range(part, num_layers + 1):
            least = inf
            for start in range(end):
                weight = ends[end] - ends[start]
                heaviest, lightest = max(best[start][0], weight), min(best[start][1], weight)
                if heaviest - lightest <= least:
                    least, longer[end], chosen[end] = heaviest - lightest, (heaviest, lightest), start
        best = longer
        starts.append(chosen)
    bounds = [num_layers]
    for chosen in reversed(starts):
        bounds.insert(0, chosen[bounds[0]])
    return bounds
