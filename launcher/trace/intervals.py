"""Sets of moments as sorted runs that do not touch: their overlaps and lengths."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

Runs = list[tuple[int, int]]  # [began, ended), sorted, apart from each other


def union(pieces: Iterable[tuple[int, int]]) -> Runs:
    """Return all moments that are in any of them."""
    runs: Runs = []
    for began, ended in sorted(pieces):
        if ended <= began:
            continue
        if runs and began <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(ended, runs[-1][1])
        else:
            runs.append((began, ended))
    return runs


def common(one: Runs, other: Runs) -> Runs:
    """Return the moments that are in both."""
    found: Runs = []
    here, there = _first_near(other, one), _first_near(one, other)
    while here < len(one) and there < len(other):
        began, ended = max(one[here][0], other[there][0]), min(one[here][1], other[there][1])
        if began < ended:
            found.append((began, ended))
        if one[here][1] < other[there][1]:
            here += 1
        else:
            there += 1
    return found


def without(one: Runs, other: Runs) -> Runs:
    """Return the moments of `one` that are not in `other`."""
    found: Runs = []
    place = _first_near(one, other)
    for began, ended in one:
        while place < len(other) and other[place][1] <= began:
            place += 1
        at = place
        while at < len(other) and other[at][0] < ended:
            if began < other[at][0]:
                found.append((began, other[at][0]))
            began = max(began, other[at][1])
            at += 1
        if began < ended:
            found.append((began, ended))
    return found


def _first_near(one: Runs, other: Runs) -> int:
    """Return the place of the first run of `other` that may touch one of `one`: a few are often asked of
    many.
    """
    return max(0, bisect_left(other, one[0]) - 1) if one else 0


def length(runs: Runs) -> int:
    """Return their length together."""
    return sum(ended - began for began, ended in runs)
