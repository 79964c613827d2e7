"""Check for infinite or NaN gradients at any time before the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..comm.rank_group import Job
from ..zero.units.sub_buffer import SubBuffer


def has_overflow(sub_buffers: Sequence[SubBuffer], job: Job, device: torch.device) -> bool:
    """Return whether any rank has gradients that are not finite: its own gradients, or its shard of the
    averages.

    Order: a collective
    """
    is_bad = any(
        not bool(torch.isfinite(piece).all()) for sub_buffer in sub_buffers for piece in _own(sub_buffer)
    )
    flags = job.all_gather_numbers([is_bad], device=device, what="the look for infinite gradients")
    return any(one for (one,) in flags)


def _own(sub_buffer: SubBuffer) -> Iterable[Tensor]:
    own = sub_buffer.gradients.unaveraged
    if own is not None:
        return (own,)
    return sub_buffer.grad_chunk(sub_buffer.plan.shard_index, num_chunks=sub_buffer.plan.num_shards)
