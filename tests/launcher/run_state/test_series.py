"""Numbers over a long time in few points."""

from __future__ import annotations

import math

import pytest

from dslaunch.launcher.run_state.series import Point, Series


@pytest.mark.parametrize("num_values", [1, 7, 8, 9, 100, 4097])
def test_means_and_extremes_stay(num_values: int) -> None:
    series = Series(max_points=8)
    for place in range(num_values):
        series.add(float(place), float(place * place))
    points = series.points
    assert len(points) <= 8
    assert sum(one.number for one in points) == num_values
    total = sum(one.mean * one.number for one in points)
    assert total == pytest.approx(sum(place * place for place in range(num_values)))
    assert (points[0].least, points[-1].most) == (0.0, float((num_values - 1) ** 2))
    assert points[-1].at == num_values - 1
    assert [one.at for one in points] == sorted(one.at for one in points)
    assert series.last == float((num_values - 1) ** 2)


def test_what_is_no_number_leaves_means_alone() -> None:
    series = Series(max_points=2)
    for place, value in enumerate([1.0, math.nan, 3.0, math.inf]):
        series.add(float(place), value)
    assert [one.number for one in series.points] == [2, 2]
    assert [(one.mean, one.least, one.most) for one in series.points] == [(1.0, 1.0, 1.0), (3.0, 3.0, 3.0)]
    assert series.last == math.inf
    assert math.isnan(Point.of(0.0, math.nan).and_later(Point.of(1.0, math.inf)).mean)
