"""Numbers and words over the time of a run, with a bound on how many are kept however long it lasts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

from .values import number

T = TypeVar("T")

MAX_POINTS = 600  # points of a curve; a chart is about as many pixels wide
MAX_LINES = 8  # curves beside each other; more become the least, the mean and the greatest
MAX_MARKS = 200
MAX_VALUE = 1e300  # limit of drawn values: differences and sums of numbers beyond are infinite
MAX_AT = float(1 << 53)  # limit of a time or a step; a greater one counts as none


class Kept(Generic[T]):
    """The first and the last of many; those in between are counted."""

    def __init__(self, num_first: int, num_last: int) -> None:
        self._first: list[T] = []
        self._last: deque[T] = deque(maxlen=num_last)
        self._num_first = num_first
        self.num = 0

    def append(self, one: T) -> None:
        self.num += 1
        (self._first if len(self._first) < self._num_first else self._last).append(one)

    @property
    def num_left_out(self) -> int:
        return self.num - len(self)

    def __len__(self) -> int:
        return len(self._first) + len(self._last)

    def __iter__(self) -> Iterator[T]:
        return chain(self._first, self._last)


class Spread(NamedTuple):
    """The report of one rank, or of the ranks of one host together, at one time, for `weight` ranks."""

    key: str
    low: float
    mean: float
    high: float
    low_key: str
    high_key: str
    weight: float = 1.0

    @classmethod
    def of(cls, key: str, value: Any, weight: float = 1.0) -> Spread | None:
        """Return one number, or five of several ranks: least, mean, greatest, and the ranks of the first and
        last.
        """
        if not isinstance(value, list):
            found = number(value)
            return None if found is None else single(key, found)
        told = [number(one) for one in value]
        if len(told) != 5 or any(one is None for one in told):
            return None
        low, mean, high, *ranks = (math.nan if one is None else one for one in told)
        low_key, high_key = (str(int(one)) if math.isfinite(one) else "" for one in ranks)
        return cls(key, low, mean, high, low_key, high_key, weight)

    def scaled(self, factor: float) -> Spread:
        return self._replace(low=self.low * factor, mean=self.mean * factor, high=self.high * factor)


def single(key: str, value: float) -> Spread:
    return Spread(key, value, value, value, key, key)


class Point(NamedTuple):
    """The values of a curve at one place: of all sources, and of each if they are few."""

    at: float
    attempt: int
    low: float
    mean: float
    high: float
    low_key: str
    high_key: str
    each: Mapping[str, float]


@dataclass(slots=True)
class _Bucket:
    """All reports between two times."""

    at: float = 0.0
    num: int = 0
    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    weight: float = 0.0
    low_key: str = ""
    high_key: str = ""
    each: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, at: float, spreads: Iterable[Spread], *, keeps_each: bool) -> None:
        self.at, self.num = self.at + at, self.num + 1
        for one in spreads:
            if one.low < self.low:
                self.low, self.low_key = one.low, one.low_key
            if one.high > self.high:
                self.high, self.high_key = one.high, one.high_key
            self.total += one.mean * one.weight
            self.weight += one.weight
            if keeps_each:
                total, weight = self.each.get(one.key, (0.0, 0.0))
                self.each[one.key] = total + one.mean * one.weight, weight + one.weight

    def merge(self, other: _Bucket) -> None:
        self.at, self.num = self.at + other.at, self.num + other.num
        if other.low < self.low:
            self.low, self.low_key = other.low, other.low_key
        if other.high > self.high:
            self.high, self.high_key = other.high, other.high_key
        self.total, self.weight = self.total + other.total, self.weight + other.weight
        for key, (total, weight) in other.each.items():
            before = self.each.get(key, (0.0, 0.0))
            self.each[key] = before[0] + total, before[1] + weight

    def point(self, attempt: int) -> Point:
        each = {key: total / weight for key, (total, weight) in self.each.items() if weight}
        mean = self.total / self.weight if self.weight else math.nan
        at = self.at / max(1, self.num)
        return Point(at, attempt, self.low, mean, self.high, self.low_key, self.high_key, each)


class Curve:
    """One quantity over time or steps. `width` is the least distance of two points that are kept apart; it
    doubles whenever they become too many.

    `gaps` are places of a number that cannot be drawn: NaN, infinite, or beyond MAX_VALUE.
    """

    def __init__(self, *, width: float = 0.05, max_points: int = MAX_POINTS) -> None:
        self._width, self._max_points = width, max_points
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._is_each_kept = True
        self.keys: dict[str, None] = {}  # sources, in the order of their first report
        self.num_told = 0
        self.gaps: list[float] = []
        self.num_gaps = 0
        self.last = math.nan  # the mean of the last report, be it a number or not

    def add(self, at: float, attempt: int, spreads: Iterable[Spread]) -> None:
        """Add the reports of all at one time."""
        given = list(spreads)
        has_place = abs(at) <= MAX_AT  # no NaN is
        finite = [one for one in given if one.low >= -MAX_VALUE and one.high <= MAX_VALUE]
        weight = sum(one.weight for one in given)
        if weight and has_place:
            self.last = sum(one.mean * one.weight for one in given) / weight
        if len(finite) < len(given):
            self.num_gaps += 1
            if len(self.gaps) < MAX_MARKS:
                self.gaps.append(at)
        if not finite or not has_place:
            return
        self.num_told += 1
        if self._is_each_kept:
            self.keys.update((one.key, None) for one in finite)
            if len(self.keys) > MAX_LINES or any(one.weight > 1 for one in finite):
                self._is_each_kept = False
                for bucket in self._buckets.values():
                    bucket.each = {}
        place = attempt, math.floor(at / self._width)
        self._buckets.setdefault(place, _Bucket()).add(at, finite, keeps_each=self._is_each_kept)
        while len(self._buckets) > self._max_points and self._width < 1e12:
            self._halve()

    def _halve(self) -> None:
        self._width *= 2
        before, self._buckets = self._buckets, {}
        for (attempt, place), bucket in before.items():
            known = self._buckets.setdefault((attempt, place // 2), bucket)
            if known is not bucket:
                known.merge(bucket)

    @property
    def has_lines(self) -> bool:
        """Tell whether each source has a line."""
        return self._is_each_kept and len(self.keys) > 1

    def points(self) -> list[Point]:
        """Return the points in the order of attempts, and of time in each."""
        return [bucket.point(attempt) for (attempt, _), bucket in sorted(self._buckets.items())]

    def __bool__(self) -> bool:
        """Tell whether there was a report, be it a number or not."""
        return bool(self._buckets) or self.num_gaps > 0
