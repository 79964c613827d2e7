"""Many host names in a few words: `node[1-4,7], gpu5`."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)")


def folded(names: Iterable[str]) -> str:
    """Return all names in few words, in order of their first appearance; names that differ only in their
    last number become one word.

    The form is that of a hostfile's ranges: padding with zeros is kept, and IPv6 addresses are not folded.
    """
    # (text before, text behind, padded width or 0) -> numbers
    groups: dict[tuple[str, str, int], list[int]] = {}
    for name in dict.fromkeys(names):
        match = None if ":" in name else _NUMBERED.fullmatch(name)
        if match is None:
            groups[name, "", -1] = []
            continue
        digits = match[2]
        width = len(digits) if digits.startswith("0") and len(digits) > 1 else 0
        groups.setdefault(_key_of(groups, match, width), []).append(int(digits))
    return ", ".join(_word(*key, numbers) for key, numbers in groups.items())


def _key_of(
    groups: dict[tuple[str, str, int], list[int]], match: re.Match[str], width: int
) -> tuple[str, str, int]:
    """Return the name's group. `node10` may belong to `node[08-10]`, although its number does not begin with
    zero.
    """
    padded = (match[1], match[3], len(match[2]))
    return padded if not width and padded in groups else (match[1], match[3], width)


def _word(before: str, behind: str, width: int, numbers: list[int]) -> str:
    if width < 0:
        return before
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    texts = [
        str(first).zfill(width) + (f"-{str(last).zfill(width)}" if last > first else "")
        for first, last in spans
    ]
    inside = ",".join(texts)
    return f"{before}[{inside}]{behind}" if len(numbers) > 1 else f"{before}{inside}{behind}"
