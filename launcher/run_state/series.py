"""Numbers over time in a bounded number of points."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


class Point(NamedTuple):
    """Some values that followed each other: when the last one came, their mean, and the least and greatest.

    `number` is how many they are. Values that are not finite are neither in the mean nor in the extremes:
    of a point that has no other the mean is not a number.
    """

    at: float
    mean: float
    least: float
    most: float
    number: int

    @classmethod
    def of(cls, at: float, value: float) -> Point:
        is_finite = math.isfinite(value)
        return cls(at, value, value, value, 1) if is_finite else cls(at, math.nan, math.nan, math.nan, 1)

    def and_later(self, later: Point) -> Point:
        """Both as one."""
        if math.isnan(self.mean) or math.isnan(later.mean):
            known = later if math.isnan(self.mean) else self
            return known._replace(at=later.at, number=self.number + later.number)
        number = self.number + later.number
        return Point(
            at=later.at,
            mean=self.mean + (later.mean - self.mean) * (later.number / number),
            least=min(self.least, later.least),
            most=max(self.most, later.most),
            number=number,
        )


class Series:
    """A number over the whole time, however long that is.

    When there are too many points, each two become one, and from then on a point has twice as many values.
    """

    def __init__(self, max_points: int = 512) -> None:
        self._max_points = max(2, max_points)
        self._points: list[Point] = []
        self._per_point = 1
        self._last = math.nan

    @property
    def last(self) -> float:
        """The newest value; not a number if there is none."""
        return self._last

    @property
    def points(self) -> tuple[Point, ...]:
        """The oldest first."""
        return tuple(self._points)

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    def add(self, at: float, value: float) -> None:
        self._last = value
        one = Point.of(at, value)
        if self._points and self._points[-1].number < self._per_point:
            self._points[-1] = self._points[-1].and_later(one)
            return
        if len(self._points) >= self._max_points:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            rest = self._points[-1:] if len(self._points) % 2 else []
            self._points = [*(first.and_later(second) for first, second in pairs), *rest]
            self._per_point *= 2
        self._points.append(one)

    def since(self, at: float) -> tuple[Point, ...]:
        """The points that came at that time or later."""
        return tuple(one for one in self._points if one.at >= at)
