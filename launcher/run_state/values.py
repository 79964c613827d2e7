"""Values of an event, whose writer may be a program of a user: each has its type, or is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # JSON has no such numbers


def number(value: Any) -> float | None:
    """Return a number, also one that JSON cannot have."""
    kind = type(value)
    if kind is float:  # most are
        found: float = value
        return found
    if kind is int:
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return _WORDS.get(value) if kind is str else None


def whole(value: Any) -> int | None:
    """Return a whole number; none is larger than a computer counts."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 63:
        return None
    return value


def whole_or(value: Any, default: int = -1) -> int:
    """Return a whole number; the default for other values."""
    found = whole(value)
    return default if found is None else found


def text(value: Any) -> str:
    """Return a text, which may be empty."""
    return value if isinstance(value, str) else ""


def mapping(value: Any) -> Mapping[str, Any]:
    """Return an object of JSON, which may be empty."""
    return value if isinstance(value, dict) else {}


def items(value: Any) -> list[Any]:
    """Return a list of JSON, which may be empty."""
    return value if isinstance(value, list) else []


def mean_of(value: Any) -> float | None:
    """Return a number; of the five that are reported for several ranks (least, mean, greatest, their ranks)
    the mean.
    """
    if type(value) is list:
        return number(value[1]) if len(value) == 5 else None
    return number(value)


def greatest_of(value: Any) -> float | None:
    """Return the same, of several ranks the greatest."""
    if type(value) is list:
        return number(value[2]) if len(value) == 5 else None
    return number(value)


def numbers(value: Any) -> dict[str, float]:
    """Return the numbers of an object, by name."""
    found = {}
    for name, one in mapping(value).items():
        told = number(one)
        if told is not None:
            found[name] = told
    return found


def texts(value: Any) -> list[str]:
    """Return the texts of a list of JSON."""
    return [one for one in items(value) if isinstance(one, str)]
