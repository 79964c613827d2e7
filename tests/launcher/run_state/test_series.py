"""Curves keep a bounded number of points, and lose neither the least and the greatest nor who told them."""

from __future__ import annotations

import math

import pytest

from dslaunch.launcher.run_state.series import MAX_LINES, Curve, Kept, Spread, single


@pytest.mark.parametrize("num", [1, 10, 599, 5000])
def test_however_long_a_run_lasts_its_curves_have_few_points(num: int) -> None:
    curve = Curve(max_points=100)
    for second in range(num):
        curve.add(float(second), 0, [single("0", float(second)), single("1", second + 0.5)])
    points = curve.points()
    assert min(num, 50) <= len(points) <= 100
    assert [one.at for one in points] == sorted(one.at for one in points)
    assert (points[0].low, points[-1].high) == (0.0, num - 0.5)
    assert (points[-1].low_key, points[-1].high_key) == ("0", "1")
    total = sum(one.mean for one in points) / len(points)
    assert total == pytest.approx((num - 0.5) / 2, rel=0.02)
    assert curve.last == num - 0.75
    assert curve.has_lines
    assert points[-1].each["1"] - points[-1].each["0"] == pytest.approx(0.5)


def test_a_peak_of_one_moment_is_not_lost() -> None:
    curve = Curve(max_points=20)
    for second in range(10_000):
        curve.add(float(second), 0, [single("3", 100.0 if second == 7777 else 1.0), single("4", 1.0)])
    peak = max(curve.points(), key=lambda one: one.high)
    assert (peak.high, peak.high_key) == (100.0, "3")
    assert abs(peak.at - 7777) < 1000


def test_many_ranks_have_a_band_and_no_lines_of_their_own() -> None:
    curve = Curve()
    curve.add(1.0, 0, [single(str(rank), float(rank)) for rank in range(MAX_LINES)])
    assert curve.has_lines
    curve.add(2.0, 0, [single(str(rank), float(rank)) for rank in range(MAX_LINES + 1)])
    assert not curve.has_lines
    assert all(one.each == {} for one in curve.points())


def test_folded_ranks_count_as_many_as_they_are() -> None:
    curve = Curve()
    curve.add(
        1.0, 0, [Spread("a *", 1.0, 2.0, 3.0, "5", "6", 3.0), Spread("b *", 6.0, 6.0, 6.0, "9", "9", 1.0)]
    )
    (point,) = curve.points()
    assert (point.low, point.mean, point.high, point.low_key, point.high_key) == (1.0, 3.0, 6.0, "5", "9")


def test_what_is_no_number_is_counted_and_does_not_spoil_the_rest() -> None:
    curve = Curve()
    curve.add(1.0, 0, [single("0", 2.0)])
    curve.add(2.0, 0, [single("0", math.nan)])
    curve.add(3.0, 0, [single("0", math.inf), single("1", 4.0)])
    assert curve.gaps == [2.0, 3.0]
    assert [one.mean for one in curve.points()] == [2.0, 4.0]


def test_attempts_stay_apart() -> None:
    curve = Curve(max_points=4)
    for second in range(1000):
        curve.add(float(second), second // 500, [single("0", float(second // 500))])
    assert [(one.attempt, one.mean) for one in curve.points()] == sorted(
        (one.attempt, float(one.attempt)) for one in curve.points()
    )


def test_of_many_words_the_first_and_the_last_are_kept() -> None:
    kept: Kept[int] = Kept(2, 3)
    for number in range(10):
        kept.append(number)
    assert list(kept) == [0, 1, 7, 8, 9]
    assert (len(kept), kept.num, kept.num_left_out) == (5, 10, 5)


@pytest.mark.parametrize("value", [[1, 2], [1, 2, 3, "x", 5], "three", True, None, [1, 2, 3, None, 5]])
def test_what_is_no_number_has_no_spread(value: object) -> None:
    assert Spread.of("0", value) is None
    assert Spread.of("a *", [1, 2, "inf", 4, "nan"], 8) == Spread("a *", 1, 2, math.inf, "4", "", 8)
