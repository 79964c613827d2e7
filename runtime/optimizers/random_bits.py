"""Rounding by random bits: the arithmetic of kernels/random_bits.h in torch's operations, and the seeds of
both.

A bit depends on the optimizer's step, the parameter's name and the element's place in the parameter alone. So
a value is rounded alike at every stage, on any number of ranks, in any memory, and after a resume.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_STATES, _PARAM = 0, 1


def seed_of(name: str, step: int) -> int:
    """Return the 32 bits for a parameter in one step."""
    # the last steps of SplitMix64 (Steele, Lea and Flood 2014): each bit of both changes all of the seed
    x = (_number_of(name) + step * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x >> 32


@cache  # there are as many as the model has parameters
def _number_of(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def bits_of_states(seed: int, first: int, numel: int, device: torch.device) -> Tensor:
    """Return 32 bits for each of the elements from place `first` on: the lower half is for the first state,
    the upper half for the second.

    Shapes: [numel] int32
    """
    return _bits(seed, first, numel, device, _STATES)


def bits_of_param(seed: int, first: int, numel: int, device: torch.device) -> Tensor:
    """Return 32 bits for each of the elements from place `first` on, the lower half of which is for the
    parameter.

    Shapes: [numel] int32
    """
    return _bits(seed, first, numel, device, _PARAM)


def round_by(bits: Tensor, values: Tensor) -> Tensor:
    """Return the values as bfloat16, rounded down or up by the lower half of the bits.

    Shapes: bits [n] int32, values [n] float32
    """
    exact = values.view(torch.int32)
    rounded = (exact + (bits & 0xFFFF)) >> 16
    rounded = torch.where(values.isnan(), (exact | 0x00400000) >> 16, rounded)
    return rounded.to(torch.int16).view(torch.bfloat16)


def _bits(seed: int, first: int, numel: int, device: torch.device, array: int) -> Tensor:
    parts = []
    while numel > 0:
        high, low = divmod(first, 2**32)
        here = min(numel, 2**32 - low)
        key = _random_bits(_spread(2 * high + array), seed)
        places = torch.arange(low, low + here, dtype=torch.int64, device=device)
        parts.append(_random_bits_of(places.to(torch.int32), _signed(key)))
        first, numel = first + here, numel - here
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def _random_bits_of(index: Tensor, key: int) -> Tensor:
    """Do what `_spread` and `_random_bits` do, for int32, whose products wrap around."""
    x = index.mul_(_signed(0x9E3779B1))
    x ^= _shifted(x, 15)
    x ^= key
    x *= _signed(0x85EBCA77)
    x ^= _shifted(x, 13)
    x *= _signed(0xC2B2AE3D)
    x ^= _shifted(x, 16)
    return x


def _shifted(x: Tensor, count: int) -> Tensor:
    return (x >> count) & (_LOW >> count)


def _signed(number: int) -> int:
    return number - 2**32 if number >= 2**31 else number


def _spread(index: int) -> int:
    x = index * 0x9E3779B1 & _LOW
    return x ^ (x >> 15)


def _random_bits(spread_index: int, key: int) -> int:
    x = (spread_index ^ key) * 0x85EBCA77 & _LOW
    x = (x ^ (x >> 13)) * 0xC2B2AE3D & _LOW
    return x ^ (x >> 16)
