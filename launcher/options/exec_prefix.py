"""The words that lead into the container in which a host's ranks run."""

from __future__ import annotations

from ..inputs.exec_prefix import EXAMPLE, PrefixMistake, read_prefix


def prefix(value: str) -> tuple[str, ...]:
    """Read the words.

    Errors: ValueError for text that is no such prefix
    """
    if value and not value.strip():  # as from "$IN $BOX", if neither variable is set
        raise ValueError(f"{value!r} has no word in it; write e.g. {EXAMPLE!r}, or leave it out")
    try:
        return read_prefix(value)
    except PrefixMistake as mistake:
        raise ValueError(f"{value!r}: {mistake}; write e.g. {EXAMPLE!r}") from None
