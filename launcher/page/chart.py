"""A chart for a page: a picture, a sentence for readers who do not see it, and a table of its numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_ROWS = 40  # rows of the table with a chart's numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """`figure` is an object of the library of charts. `key` names the chart in the page."""

    key: str
    title: str
    summary: str
    figure: Any
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUnit:
    """The unit of an axis of time."""

    name: str
    seconds: float

    def of(self, seconds: float) -> float:
        return seconds / self.seconds


def time_unit(duration_s: float) -> TimeUnit:
    """Return the unit in which a run of that length has short numbers."""
    if duration_s < 300:
        return TimeUnit(name="s", seconds=1.0)
    if duration_s < 3 * 3600:
        return TimeUnit(name="min", seconds=60.0)
    if duration_s < 4 * 86400:
        return TimeUnit(name="h", seconds=3600.0)
    return TimeUnit(name="days", seconds=86400.0)


def shown(value: float, digits: int = 4) -> str:
    """Write a number in few characters; empty for none."""
    if math.isnan(value):
        return ""
    if math.isinf(value):  # a difference of two numbers may be infinite
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.{digits}g}"


def said(value: float) -> str:
    """Write a reported number; if it is no number, its own text."""
    return "NaN" if math.isnan(value) else shown(value)


def some_of(rows: Sequence[tuple[str, ...]], limit: int = MAX_ROWS) -> tuple[tuple[str, ...], ...]:
    """Return at most so many of them, at equal distances, with the first and the last."""
    if len(rows) <= limit:
        return tuple(rows)
    last = len(rows) - 1
    return tuple(rows[round(place * last / (limit - 1))] for place in range(limit))


def by_number(name: str) -> list[tuple[int, str]]:
    """Key that sorts `worker-2` before `worker-10`."""
    return [(int(one) if one.isdecimal() else -1, one) for one in re.split("([0-9]{1,9})", name) if one]
