"""Lines of a screen as data: pieces of text, each with the name of its style."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from ..wording import cleaned


class StyledText(NamedTuple):
    """Text of one style: `bold`, `dim`, `good`, `warn`, `bad`, `head`, `key`, the title of a picture, or a
    phase of a step; empty: none.
    """

    text: str
    style: str = ""


Line = tuple[StyledText, ...]


def line(*pieces: StyledText | str) -> Line:
    """Join pieces in a row; empty ones are left out."""
    spans = (StyledText(one) if isinstance(one, str) else one for one in pieces)
    return tuple(one for one in spans if one.text)


def plain(pieces: Line) -> str:
    """Return the text alone."""
    return "".join(one.text for one in pieces)


def num_columns(text: str) -> int:
    """Return the width of the text on a terminal."""
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def _columns_of(one: str) -> int:
    if unicodedata.combining(one):
        return 0
    return 2 if unicodedata.east_asian_width(one) in "WF" else 1


def shown(text: str, max_length: int = 500) -> str:
    """Return foreign text, harmless to a terminal."""
    return cleaned(text.expandtabs(4), max_length).encode("utf-8", "replace").decode()


def cut(text: str, width: int, *, more: str = "~") -> str:
    """Return the text, or its beginning and a mark, in so many columns at most."""
    if num_columns(text) <= width:
        return text
    kept, used = "", 0
    for one in text:
        used += _columns_of(one)
        if used > width - len(more):
            break
        kept += one
    return (kept + more)[: max(0, width)] if width > 0 else ""


def padded(text: str, width: int, *, is_right: bool = False) -> str:
    """Return the text in exactly so many columns."""
    kept = cut(text, width)
    space = " " * (width - num_columns(kept))
    return space + kept if is_right else kept + space


def fitted(pieces: Sequence[StyledText], width: int) -> Line:
    """Return the line in so many columns at most, harmless whatever is in it."""
    found, left = [], width
    for one in pieces:
        if left <= 0:
            break
        kept = cut(one.text if one.text.isprintable() else shown(one.text), left)
        found.append(one._replace(text=kept))
        left -= num_columns(kept)
    return line(*found)


def width_of(pieces: Line) -> int:
    """Return its number of columns."""
    return sum(num_columns(one.text) for one in pieces)
