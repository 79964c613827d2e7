"""Sets of ranks as text: `0,4-7`."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ITEM = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", re.ASCII)


def parse_ranks(text: str) -> tuple[range, ...]:
    """Return the ranks that `0,4-7`, `all` or `none` mean, in the order given.

    Errors: ValueError, with a sentence, for other text
    """
    word = text.strip().lower()
    if word == "none":
        return ()
    if word == "all":
        return (range(10**7),)
    parts = []
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise ValueError(
                f"{item.strip()!r} is not a rank; write ranks and ranges such as 0,4-7, or all, or none"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{item.strip()!r} is an empty range; write {last}-{first}")
        parts.append(range(first, last + 1))
    return tuple(parts)


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ranks in the shortest form that parse_ranks() reads: `0-3,7`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
