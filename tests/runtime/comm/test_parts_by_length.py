"""What steps that were not timed were made of."""

from __future__ import annotations

import pytest

from dslaunch.runtime.comm.parts_by_length import PartsByLength


def test_the_last_ten_or_so_of_its_length_count() -> None:
    parts = PartsByLength()
    for number in range(100):
        parts.add({"forward": 0.7, "data": 0.1} if number % 2 else {"forward": 0.5, "data": 0.3})
    parts.add_untimed(0.8)
    assert parts.take() == pytest.approx({"forward": 0.6, "data": 0.2}, rel=0.06)
    for _ in range(20):
        parts.add({"forward": 0.2, "data": 0.6})
    parts.add_untimed(0.8)
    assert parts.take() == pytest.approx({"forward": 0.2, "data": 0.6}, rel=0.3)


def test_each_is_divided_once_and_only_if_one_was_about_as_long() -> None:
    parts = PartsByLength()
    for seconds in (1.1, 1.2, 0.6, 3.0, 0.3, 5.0):
        parts.add_untimed(seconds)
    parts.add({"forward": 0.75, "comm": 0.75})
    whole = 1.1 + 1.2 + 0.6 + 3.0
    assert parts.take() == pytest.approx({"forward": whole / 2, "comm": whole / 2})
    assert parts.take() == {}
