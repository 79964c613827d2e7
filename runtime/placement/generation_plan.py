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


class KeysAndValues(NamedTuple):
    """The cache of a generation on one rank; all 0 if it is not known."""

    num_bytes: int = 0  # for all tokens
    # More of it, where the model's config and the arguments say so much.
    num_sequences: int = 0
    num_tokens: int = 0  # a sequence has so many at the end
    bytes_per_token: int = 0  # a sequence takes so many for another one, in layers that keep all tokens
    is_static: bool = False  # the cache is made at its full length


class GenerationRoom(NamedTuple):
    """Memory of one rank, before a generation."""

    gathered_bytes: int  # all sharded parameters take so many when they are whole
    free_bytes: int
    cache: KeysAndValues = KeysAndValues()


def cache_misfit(room: GenerationRoom, rank: int) -> str:
    """Return in words how large a rank's cache is, and which ones would fit."""
    cache = room.cache
    per_sequence = cache.num_bytes // max(1, cache.num_sequences)
    fixed = per_sequence - cache.num_tokens * cache.bytes_per_token
    most = room.free_bytes // max(1, per_sequence)
    left = room.free_bytes // max(1, cache.num_sequences) - fixed
    longest = max(0, left // max(1, cache.bytes_per_token))
    return (
        f"{cache.num_sequences} sequences of {cache.num_tokens} tokens have {_size(cache.num_bytes)} of keys "
        f"and values, and {_size(room.free_bytes)} were free on rank {rank}: {most} sequences of this length "
        f"fit, or {longest} tokens of each. Give fewer prompts or beams at once, a smaller max_new_tokens, "
        'dtype torch.bfloat16, more ranks in tensor_parallel, or cache_implementation="offloaded"'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How ranks generate: `weights` is "whole" or "units"; `line` says why, in one line."""

    weights: str
    line: str


def plan_generation(rooms: Sequence[GenerationRoom], *, wanted: str | None = None) -> Generation:
    """Return how ranks with this memory generate, the same for all: `rooms` are by rank.

    `wanted`: what the program asks for, whatever fits.
    Errors: ConfigError for another word than "whole" and "units", and for a static cache beyond a rank's
            free memory
    """
    if wanted not in (None, WHOLE, UNITS):
        raise ConfigError(
            f'engine.generating(weights={wanted!r}): must be "{WHOLE}" (parameters are gathered once), '
            f'"{UNITS}" (unit by unit, for each token), or left out'
        )
    for rank, room in enumerate(rooms):
        if room.cache.is_static and room.cache.num_bytes > room.free_bytes:
            raise ConfigError(f"a static cache does not fit: {cache_misfit(room, rank)}")
    rank, room = min(enumerate(rooms), key=lambda item: _left(item[1]))
    if not any(one.gathered_bytes for one in rooms):
        return Generation(weights=WHOLE, line="generation: no parameters are sharded")
    numbers = f"{_size(room.gathered_bytes)}"
    if room.cache.num_bytes:
        numbers += f" and {_size(room.cache.num_bytes)} of keys and values"
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
    return room.free_bytes * (1 - _KEPT_FREE) - room.cache.num_bytes - room.gathered_bytes


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
