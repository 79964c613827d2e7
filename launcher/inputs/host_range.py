"""Many hosts in one word: `node[01-16]`, `dc[1-2]n[1-4]`, `n[1,3,7-9]`, `node[1-15/2]`.

The numbers of later brackets change fastest.
"""

from __future__ import annotations

import re
from itertools import product
from math import prod

MAX_HOSTS = 10_000  # limit of one word; more is surely a typing mistake

BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_PIECE = re.compile(r"([0-9]+)(?:-([0-9]+)(?:/([0-9]+))?)?")
_MAX_DIGITS = 12


class RangeMistake(ValueError):
    """Raised if a range cannot be read; the text says why, in words that follow `this line: `."""


def expand(name: str) -> tuple[str, ...]:
    """Return all names that `name` stands for, in order; `name` itself if it has no brackets.

    Padding with zeros is kept.

    Errors: RangeMistake for anything in brackets but numbers and ranges, for more than MAX_HOSTS names, or if
    a name comes out twice.
    """
    words = BRACKETS.split(name)  # text, inside of brackets, text, ...
    if any("[" in text or "]" in text for text in words[::2]):
        raise RangeMistake("a bracket has no partner; a range is written as in node[01-16]")
    spans = [[_parse_piece(piece) for piece in inside.split(",")] for inside in words[1::2]]
    num_names = prod(sum(len(numbers) for numbers, _ in span) for span in spans)
    if num_names > MAX_HOSTS:
        counted = str(num_names) if num_names < 10**_MAX_DIGITS else "so many"
        raise RangeMistake(f"{counted} hosts are more than the {MAX_HOSTS} that one range may have")
    numbers = [[str(number).zfill(width) for numbers, width in span for number in numbers] for span in spans]
    names = tuple(
        "".join(text + number for text, number in zip(words[::2], (*chosen, ""), strict=True))
        for chosen in product(*numbers)
    )
    if len(set(names)) < len(names):
        twice = next(one for place, one in enumerate(names) if one in names[:place])
        raise RangeMistake(f"the range names host {twice!r} twice")
    return names


def _parse_piece(piece: str) -> tuple[range, int]:
    """Return the numbers, and the number of digits to pad to."""
    match = _PIECE.fullmatch(piece)
    if match is None:
        raise RangeMistake(
            f"{piece!r} is not a range; brackets hold numbers and ranges joined by commas, or an IPv6 address"
        )
    first, last, step = match[1], match[2] or match[1], match[3] or "1"
    if max(len(first), len(last), len(step)) > _MAX_DIGITS:
        raise RangeMistake(f"a number of a range has at most {_MAX_DIGITS} digits")
    is_padded = any(len(number) > 1 and number.startswith("0") for number in (first, last))
    if is_padded and len(first) != len(last):
        raise RangeMistake(
            f"the range {piece} is padded with zeros, so both ends need the same number of digits"
        )
    if int(first) > int(last):
        raise RangeMistake(f"the range {piece} runs backwards")
    if int(step) == 0:
        raise RangeMistake(f"the range {piece} has a step of 0; the least is 1")
    return range(int(first), int(last) + 1, int(step)), len(first) if is_padded else 0
