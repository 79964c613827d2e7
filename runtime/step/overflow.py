"""Whether gradients are infinite or NaN, before a step asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..comm.collectives import Collectives
from ..zero.sub_buffer import SubBuffer


def has_overflow(parts: Sequence[SubBuffer], comm: Collectives) -> bool:
    """Return whether any rank has gradients that are not finite: what it has made itself,
    or its shard of the averages.

    Order: a collective
    """
    is_bad = any(not bool(torch.isfinite(piece).all()) for part in parts for piece in _own(part))
    flag = torch.tensor(float(is_bad), dtype=torch.float64, device=parts[0].device)
    return bool(comm.all_gather_float64(flag, what="the look for infinite gradients").any())


def _own(part: SubBuffer) -> Iterable[Tensor]:
    own = part.gradients.unaveraged
    if own is not None:
        return (own,)
    return part.grad_chunk(part.plan.shard_index, num_chunks=part.plan.num_shards)
