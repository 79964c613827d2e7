"""The sum of squares of gradients, in one read."""

from __future__ import annotations

from collections.abc import Iterable

from .compiled import _C
from .shard import HostArray


def squared_norm(grads: Iterable[HostArray], num_threads: int = 0) -> float:
    """Return the sum of squares of all these gradients in float64; infinities and NaN come through.

    The additions have a fixed order, so the result has the same bits for every `num_threads`.

    Shapes:  [n] float32, bfloat16 or float16, contiguous, host memory; each its own n
    Errors:  as in [Note: a step] in shard.py
    """
    return _C.squared_norm(grads, num_threads=num_threads)
