"""Values of an event, whose writer may be a program of a user: each is what it should be, or is not there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # JSON has no such numbers


def number(value: Any) -> float | None:
    """A number, also one that JSON cannot have."""
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
    """A whole number; none is larger than a computer counts."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 63:
        return None
    return value


def whole_or(value: Any, default: int = -1) -> int:
    """A whole number; the default for what is none."""
    found = whole(value)
    return default if found is None else found


def text(value: Any) -> str:
    """A text, which may be empty."""
    return value if isinstance(value, str) else ""


def mapping(value: Any) -> Mapping[str, Any]:
    """An object of JSON, which may be empty."""
    return value if isinstance(value, dict) else {}


def items(value: Any) -> list[Any]:
    """A list of JSON, which may be empty."""
    return value if isinstance(value, list) else []


def mean_of(value: Any) -> float | None:
    """A number; of the five that are told of several ranks (least, mean, greatest, and whose) the mean."""
    if type(value) is list:
        return number(value[1]) if len(value) == 5 else None
    return number(value)


def greatest_of(value: Any) -> float | None:
    """The same, of several ranks the greatest."""
    if type(value) is list:
        return number(value[2]) if len(value) == 5 else None
    return number(value)


def numbers(value: Any) -> dict[str, float]:
    """The numbers of an object, by name."""
    found = {}
    for name, one in mapping(value).items():
        told = number(one)
        if told is not None:
            found[name] = told
    return found


def texts(value: Any) -> list[str]:
    """The texts of a list of JSON."""
    return [one for one in items(value) if isinstance(one, str)]
