"""Which steps are timed, where not all are."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dslaunch.runtime.comm.timed_steps import BUDGET, MARK_S, STEP_S, TimedSteps


def chosen(step_s: float, marks: int, *, steps_per_line: float | None = None) -> set[int]:
    """Of the steps up to 100,000."""
    made = TimedSteps()
    num_steps = steps_per_line or max(1.0, 1.0 / step_s)
    made.adapt(num_steps=num_steps, seconds=num_steps * step_s, marks=marks)
    return {step for step in range(1, 100_001) if step in made}


@pytest.mark.parametrize("step_s", [0.002, 0.01, 0.05, 0.2])
@pytest.mark.parametrize("marks", [14, 80, 1000])
def test_timing_costs_what_is_allowed_or_is_of_one_step_in_a_line(step_s: float, marks: int) -> None:
    share = len(chosen(step_s, marks)) / 100_000
    cost = share * (STEP_S + marks * MARK_S) / step_s
    assert share == pytest.approx(max(step_s, BUDGET * step_s / (STEP_S + marks * MARK_S)), rel=0.02)
    assert cost <= 1.02 * BUDGET or share == pytest.approx(step_s, rel=0.02)


def test_all_are_timed_at_first_and_where_steps_are_long_or_each_is_told() -> None:
    assert all(step in TimedSteps() for step in range(1, 1000))
    assert len(chosen(2.0, 300)) == 100_000
    assert len(chosen(0.001, 80, steps_per_line=1)) == 100_000


def test_a_rank_with_a_smaller_share_times_steps_that_others_time_too() -> None:
    few, more = chosen(0.05, 80), chosen(0.06, 70)
    assert few < more


@pytest.mark.parametrize("period", [2, 3, 4, 8, 10, 16, 100, 128])
def test_what_happens_with_a_period_is_timed_as_often_as_it_happens(period: int) -> None:
    steps = chosen(0.05, 80)
    for first in range(min(period, 10)):
        in_turn = sum(step % period == first for step in steps)
        assert in_turn == pytest.approx(len(steps) / period, rel=0.1)


def test_no_long_time_passes_without_a_timed_step() -> None:
    steps = sorted(chosen(0.05, 80))
    longest = max(after - before for before, after in pairwise(steps))
    assert longest < 3 * 100_000 / len(steps)
