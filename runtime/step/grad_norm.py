"""The one gradient norm and the one clip factor, the same for every ZeRO stage.

Each rank adds the squares of its 1/world of the reduced gradients in float64, wherever the stage would let it
see more; the partial sums of all ranks are added in the order of the chunks. So the norm has the same bits at
every stage, and every rank has the same norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt

import torch
from torch import Tensor

from ...kernels import squared_norm
from ..comm.collectives import Collectives
from ..optimizers.on_device import squared_norm_on_device
from ..zero.sub_buffer import SubBuffer

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ and DeepSpeed add it to the norm


def global_grad_norm(
    sub_buffers: Sequence[SubBuffer], comm: Collectives, *, note: Sequence[float] = ()
) -> tuple[float, list[list[float]]]:
    """Return the 2-norm of all reduced gradients, before clipping, infinite or NaN if any gradient is; and
    every rank's note.

    The norm is infinite or NaN if any gradient is.
    Order: a collective
    """
    mesh = comm.mesh
    device = sub_buffers[0].device
    squares = [sub_buffer.gradients.squares() for sub_buffer in sub_buffers]
    chunks = [
        chunk
        for sub_buffer, known in zip(sub_buffers, squares, strict=True)
        if known is None
        for chunk in sub_buffer.grad_chunk(mesh.chunk_index, num_chunks=mesh.world.size)
    ]
    total = _total(squares, chunks)
    if isinstance(total, Tensor):
        partial = total.to(device=device, dtype=torch.float64).view(1)
    else:  # filled in, as a copy would be waited for
        partial = torch.full((1,), total, dtype=torch.float64, device=device)
    own = torch.cat([partial, *(torch.full((1,), one, dtype=torch.float64, device=device) for one in note)])
    gathered = comm.all_gather_float64(own, what="the gradient norm")
    with comm.recorder.waiting_for_device():  # NCCL's wait() does not
        said = gathered.tolist()
    norm = 0.0
    for _, square in sorted((mesh.chunk_of(rank), square) for rank, (square, *_) in enumerate(said)):
        norm += square
    return sqrt(norm) if isfinite(norm) else norm, [notes for _, *notes in said]


def clip_factor(norm: float, *, max_norm: float) -> float:
    """Return what gradients must be multiplied with so that their norm is at most
    `max_norm`; 0 means no limit.
    """
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + _CLIP_EPS))


def _total(squares: Sequence[Sequence[float] | None], chunks: Sequence[Tensor]) -> float | Tensor:
    """Of those that are known and of these; a model has all of one kind."""
    total = 0.0
    for square in (one for known in squares if known is not None for one in known):
        total += square  # one after the other, as squared_norm adds its arrays
    return total + _sum_of_squares(chunks) if chunks else total


def _sum_of_squares(chunks: Sequence[Tensor]) -> float | Tensor:
    on_gpu = [chunk for chunk in chunks if chunk.is_cuda]
    total = squared_norm([chunk for chunk in chunks if not chunk.is_cuda])
    return total + _sum_on_gpu(on_gpu) if on_gpu else total


def _sum_on_gpu(chunks: Sequence[Tensor]) -> Tensor:
    total = squared_norm_on_device(chunks, device=chunks[0].device)
    if total is not None:
        return total
    # One launch for all, which converts as it reads: vector_norm() would make a float64 copy of each.
    norms = torch._foreach_norm(list(chunks), 2.0, dtype=torch.float64)
    return torch.stack(list(norms)).square().sum()
