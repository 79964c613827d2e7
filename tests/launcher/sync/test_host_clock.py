"""How far the clock of a host is from ours."""

from __future__ import annotations

import pytest

from dslaunch.launcher.sync.host_clock import HostClock


def test_the_quickest_answer_tells_the_most() -> None:
    clock = HostClock()
    clock.add(sent_at=1000.0, at=5000.9, heard_at=1002.0)  # slow: the answer was made late in it
    clock.add(sent_at=1010.0, at=5010.1, heard_at=1010.2)
    clock.add(sent_at=1015.0, at=5015.4, heard_at=1015.5)
    offset = clock.offset_at(5012.0)
    assert offset is not None
    assert offset.seconds == pytest.approx(-4000.0)
    assert offset.error_s == pytest.approx(0.1)


def test_a_clock_that_drifts_is_read_near_the_time_that_is_asked_for() -> None:
    clock = HostClock()
    for minute in range(600):  # 10 hours, 50 us in a second; of the first hour the answers are the quickest
        at = 60.0 * minute + 1
        delay = 0.001 if minute < 60 else 0.002
        clock.add(sent_at=at * (1 + 50e-6) - delay, at=at, heard_at=at * (1 + 50e-6) + delay)
    offset = clock.offset_at(36000.0)
    assert offset is not None
    assert offset.seconds == pytest.approx(36000.0 * 50e-6, abs=0.015)
    assert len(clock._samples) == 600


def test_without_an_answer_nothing_is_known_and_with_an_old_one_that() -> None:
    clock = HostClock()
    assert clock.offset_at(1.0) is None
    clock.add(sent_at=10.0, at=1.0, heard_at=10.2)
    offset = clock.offset_at(90000.0)
    assert offset is not None
    assert offset.seconds == pytest.approx(9.1)
