"""Buffers of one rank, which are compared after each step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..engine.base import EngineBase
from ..strided import is_strided

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)


def own_buffers(engine: EngineBase) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers, as RANK/NAME: means of a normalization, counters, tables of positions. Masks and
    packed weights are left out, as are models whose layers are divided over ranks: there a rank of the plain
    run has other layers, or more of them.
    """
    axes = engine._axes
    if axes.pp > 1 or axes.tp > 1 or engine._domains.of_experts:
        return
    for name, value in engine.module.named_buffers():
        if value.dtype in _DTYPES and is_strided(value):
            yield f"{engine.global_rank}/{name}", value
