"""The one gradient norm and the one clip factor, the same for every ZeRO stage.

Each rank adds in float64 the squares of its chunk of the reduced gradients: 1/N of what N ranks share, even
at stages where a rank holds more. The partial sums of all ranks are added in the order of the chunks. So
every element of the model is counted once in the job, the norm has the same bits at every stage, and all
ranks have the same norm.

[Note: GPUs with slow float64]
Most GPUs add float64 at a 32nd or a 64th of the speed of float32, so the norm would take 2 to 4 times as
long as reading the gradients. There the squares are added in float32 within blocks of at most _BLOCK_NUMEL
elements, and the blocks in float64. torch's kernel has 512 threads with four sums each for 65,536 elements,
and adds them up pairwise: no square is rounded more than _MOST_ROUNDINGS times on its way into a block's sum,
and all terms are positive. So the sum of squares is off by at most _MOST_ROUNDINGS * 2**-24 of itself (4e-6),
and the norm by half of that. float32 cannot hold every sum: if the sum of all ranks is infinite, or so small
that squares may have been lost, all ranks add once more in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import copysign, inf, isfinite, sqrt

import torch
from torch import Tensor

from ...kernels import squared_norm
from ..mesh.domain import Domains
from ..optimizers.on_device import squared_norm_on_device
from ..zero.units.sub_buffer import SubBuffer

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ and DeepSpeed add it to the norm
# See [Note: GPUs with slow float64].
_FAST_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}  # compute capabilities: half the speed of float32
_BLOCK_NUMEL = 2**25
_MOST_ROUNDINGS = 64
# smallest sum of squares in float32: 2**40 of them below its smallest number do not count
_SMALLEST = 2.0**-60


def global_grad_norm(
    sub_buffers: Sequence[SubBuffer],
    domains: Domains,
    *,
    device: torch.device | None = None,
    note: Sequence[float | Tensor] = (),
) -> tuple[float, list[list[float]]]:
    """Return the 2-norm of all reduced gradients before clipping, and every rank's note. `device` is the
    model's, for a rank that trains no parameter.

    The norm is infinite or NaN if any gradient is. On GPUs with slow float64 it is off by at most
    2e-6 of itself, else by the rounding of float64; see [Note: GPUs with slow float64].
    Order: a collective, and another one where float32 cannot hold the sum
    """
    device = device or sub_buffers[0].device
    counted = [sub_buffer for sub_buffer in sub_buffers if sub_buffer.mesh.is_counted]
    squares = [sub_buffer.gradients.squares() for sub_buffer in counted]
    chunks = [
        chunk
        for sub_buffer, known in zip(counted, squares, strict=True)
        if known is None
        for chunk in sub_buffer.grad_chunk(
            sub_buffer.mesh.chunk_index, num_chunks=sub_buffer.mesh.sharers.size
        )
    ]
    in_float32 = has_slow_float64(device) and any(chunk.is_cuda for chunk in chunks)
    total = _total(squares, chunks, in_float32=in_float32)
    square, is_float32, notes = _of_all_ranks(total, domains, device, note, is_float32=in_float32)
    if is_float32 and not _SMALLEST <= square < inf:
        total = _total(squares, chunks, in_float32=False)
        square, _, notes = _of_all_ranks(total, domains, device, note, is_float32=False)
    return sqrt(square) if isfinite(square) else square, notes


def _of_all_ranks(
    total: float | Tensor,
    domains: Domains,
    device: torch.device,
    note: Sequence[float | Tensor],
    *,
    is_float32: bool,
) -> tuple[float, bool, list[list[float]]]:
    """Return the sum of the ranks' totals, whether any total was added in float32, and the ranks' notes."""
    own = _as_float64(total, device)
    if is_float32:
        # a negative total tells the other ranks that it was added in float32: their GPUs may differ
        own = own.neg()
    own = torch.cat([own, *(_as_float64(one, device) for one in note)])
    gathered = domains.job.all_gather_float64(own, what="the gradient norm")
    with domains.wire.recorder.waiting_for_device():  # NCCL's wait() does not make the host wait
        said = gathered.tolist()
    square = 0.0
    for rank in domains.summands:
        square += abs(said[rank][0])
    return square, any(copysign(1.0, one) < 0.0 for one, *_ in said), [notes for _, *notes in said]


def _as_float64(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=torch.float64).view(1)
    # Fill the tensor: the host would wait for a copy.
    return torch.full((1,), value, dtype=torch.float64, device=device)


def has_slow_float64(device: torch.device) -> bool:
    """Tell whether the device is a GPU that adds float64 much slower than float32."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) not in _FAST_FLOAT64


def clip_factor(norm: float, *, max_norm: float) -> float:
    """Return the factor for the gradients that makes their norm at most `max_norm`; `max_norm` 0 means no
    limit.
    """
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + _CLIP_EPS))


def _total(
    squares: Sequence[Sequence[float] | None], chunks: Sequence[Tensor], *, in_float32: bool
) -> float | Tensor:
    """Return the sum of the squares that are known already and of the chunks' own; a model has only one of
    these kinds.
    """
    total = 0.0
    for square in (one for known in squares if known is not None for one in known):
        total += square  # one square after the other, as squared_norm adds its arrays
    return total + _sum_of_squares(chunks, in_float32=in_float32) if chunks else total


def _sum_of_squares(chunks: Sequence[Tensor], *, in_float32: bool) -> float | Tensor:
    on_gpu = [chunk for chunk in chunks if chunk.is_cuda]
    total = squared_norm([chunk for chunk in chunks if not chunk.is_cuda])
    return total + _sum_on_gpu(on_gpu, in_float32=in_float32) if on_gpu else total


def _sum_on_gpu(chunks: Sequence[Tensor], *, in_float32: bool) -> Tensor:
    if in_float32:
        blocks = [block for chunk in chunks for block in torch.split(chunk, _BLOCK_NUMEL)]
        norms = torch._foreach_norm(blocks, 2.0, dtype=torch.float32)
        return torch.stack(list(norms)).double().square().sum()
    total = squared_norm_on_device(chunks, device=chunks[0].device)
    if total is not None:
        return total
    # One launch for all chunks converts as it reads: vector_norm() would make a float64 copy of each.
    norms = torch._foreach_norm(list(chunks), 2.0, dtype=torch.float64)
    return torch.stack(list(norms)).square().sum()
