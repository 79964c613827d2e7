"""States of 8 bits in torch's operations: the codes and scales of kernels/eight_bits.h, to the bit.

Letters: n = elements, of which every 256 share a scale; the first is the first of a block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK_NUMEL = 256
SCALES = ".scales"  # after a state's name: the name of its scales
CODES = torch.uint8  # the dtype of a state that is kept so

_TOP = 1.875
_UNSIGNED = frozenset({"exp_avg_sq"})  # sums of squares, which have no sign
_FINITE = torch.finfo(torch.float32).max


def has_eight_bits(states: Mapping[str, Tensor]) -> bool:
    """Tell whether an optimizer's states are codes."""
    return any(name.endswith(SCALES) for name in states)


def num_scales(numel: int) -> int:
    """Return how many blocks there are."""
    return -(-numel // BLOCK_NUMEL)


def decode(codes: Tensor, scales: Tensor, name: str) -> Tensor:
    """Return the values of the state of this name.

    Shapes: codes [n] uint8, scales [ceil(n / 256)] float32, the result [n] float32
    """
    is_signed = name not in _UNSIGNED
    scale = _spread(scales, codes.numel())
    bits = codes.to(torch.int32)
    code = bits & 0x7F if is_signed else bits
    values = ((code + _bias(is_signed)) << 20).view(torch.float32) * (scale * (1 / _TOP))
    values = torch.where(code == _largest(is_signed), scale, values)
    values = torch.where(code == 0, scale - scale, values)
    return torch.where(bits > 0x7F, -values, values) if is_signed else values


def encode(values: Tensor, name: str, bits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return codes and scales of the state of this name, rounded by the lower halves of the bits, or to
    nearest: values that were decoded then have the codes and scales that they had.

    Shapes: values [n] float32, bits [n] int32, codes [n] uint8, scales [ceil(n / 256)] float32
    """
    is_signed, numel = name not in _UNSIGNED, values.numel()
    sizes = values.abs()
    blocks = pad(sizes, (0, -numel % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL)
    # as bits, whose order is that of the numbers, and a NaN is the largest
    scales = blocks.view(torch.int32).amax(dim=1).view(torch.float32)
    scale = _spread(scales, numel)
    quotient = torch.full_like(scales, _TOP) / scales  # a number divided by a tensor is rounded twice
    scaled = sizes * _spread(torch.where(quotient < _FINITE, quotient, _FINITE), numel)
    exact = scaled.view(torch.int32)
    largest, smallest = _largest(is_signed), _smallest(is_signed)
    if bits is None:
        rounded = exact + (0x7FFFF + (exact >> 20 & 1))
        threshold = torch.full_like(scaled, smallest / 2 if is_signed else 0.0)
    else:
        half = bits & 0xFFFF
        rounded = exact + (half << 4)
        threshold = half.float() * (smallest / 65536) if is_signed else torch.zeros_like(scaled)
    code = ((rounded >> 20 & 0xFFF) - _bias(is_signed)).clamp(max=largest)
    code = torch.where(scaled < smallest, (threshold < scaled).to(torch.int32), code)
    code = torch.where(sizes >= scale, largest, code)
    code = torch.where(sizes == 0, 0, code)
    if is_signed:
        code |= values.view(torch.int32) >> 24 & 0x80
    return code.to(CODES), scales


def _spread(scales: Tensor, numel: int) -> Tensor:
    return scales.repeat_interleave(BLOCK_NUMEL)[:numel]


def _bias(is_signed: bool) -> int:
    return (127 - 15 if is_signed else 127 - 31) << 3


def _largest(is_signed: bool) -> int:
    return 127 if is_signed else 255


def _smallest(is_signed: bool) -> float:
    return 1.125 * 2.0 ** (-15 if is_signed else -31)
