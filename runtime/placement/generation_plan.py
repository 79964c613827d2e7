"""Whether a model's parameters are gathered once for a generation, or unit by unit for each token.

Arithmetic only. Units: bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ConfigError

WHOLE, UNITS = "whole", "units"
_KEPT_FREE = 0.1  # share of the free memory that is left to activations, logits and fragments
_GIB = 2**30


class GenerationRoom(NamedTuple):
    """Memory of one rank, before a generation."""

    gathered_bytes: int  # of all sharded parameters, whole
    free_bytes: int
    cache_bytes: int = 0  # keys and values of all tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How ranks generate: `weights` is "whole" or "units"; `line` says why, in one line."""

    weights: str
    line: str


def plan_generation(rooms: Sequence[GenerationRoom], *, wanted: str | None = None) -> Generation:
    """Return how ranks with this memory generate, the same for all: `rooms` are by rank.

    `wanted`: what the program asks for, whatever fits.
    Errors: ConfigError for another word than "whole" and "units"
    """
    if wanted not in (None, WHOLE, UNITS):
        raise ConfigError(
            f'engine.generating(weights={wanted!r}): must be "{WHOLE}" (parameters are gathered once), '
            f'"{UNITS}" (unit by unit, for each token), or left out'
        )
    rank, room = min(enumerate(rooms), key=lambda item: _left(item[1]))
    if not any(one.gathered_bytes for one in rooms):
        return Generation(weights=WHOLE, line="generation: no parameters are sharded")
    numbers = f"{_size(room.gathered_bytes)}"
    if room.cache_bytes:
        numbers += f" and {_size(room.cache_bytes)} of keys and values"
    numbers += f", of {_size(room.free_bytes)} free on rank {rank}"
    if wanted is not None:
        way, why = wanted, f"asked for: {numbers}"
    elif _left(room) >= 0:
        way, why = WHOLE, numbers
    else:
        way, why = UNITS, f"all at once do not fit with a tenth free: {numbers}"
    how = "once" if way == WHOLE else "for each token, unit by unit"
    return Generation(weights=way, line=f"generation: parameters are gathered {how} ({why})")


def _left(room: GenerationRoom) -> float:
    return room.free_bytes * (1 - _KEPT_FREE) - room.cache_bytes - room.gathered_bytes


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
