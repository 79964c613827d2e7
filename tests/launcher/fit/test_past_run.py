"""A run that was beside its plan: the table whole, and runs that tell too little."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.fit.past_run import KINDS, WAITING, ToldRun, compare, lines_beside, told_run
from dslaunch.launcher.fit.step_time import (
    BUBBLE,
    COMMUNICATION,
    COMPUTE,
    OFFLOAD,
    OPTIMIZER,
    TimeRange,
)
from dslaunch.launcher.run_state.run_state import RunState
from dslaunch.launcher.run_state.step_times import RecentSteps
from tests.launcher.made_events import Made, events_of

GOLDEN = Path(__file__).parents[1] / "golden"
PARTS = {COMPUTE: 0.2, COMMUNICATION: 0.01, OPTIMIZER: 0.02, OFFLOAD: 0.0, BUBBLE: 0.03}


def told(made: Made) -> ToldRun:
    state = RunState()
    for event in events_of(made):
        state.take(event)
    return told_run(state, job="pretrain")


def test_a_run_is_held_against_its_plan() -> None:
    run = told(Made(num_hosts=2, slots=2))
    parts = {name: TimeRange(seconds, seconds) for name, seconds in PARTS.items()}
    lines = lines_beside(run, parts, peak_bytes=20 << 30)
    ranges = {name: TimeRange(seconds, 2 * seconds) for name, seconds in PARTS.items()}
    lines += lines_beside(run, ranges, peak_bytes=20 << 30)
    text = "\n".join(lines) + "\n"
    assert text == (GOLDEN / "plan-from-run.txt").read_text(), f"\n{text}"
    compared = compare(run, parts)
    assert compared.predicted[WAITING] == pytest.approx(0.04)
    assert compared.measured.keys() == set(KINDS)
    assert sum(run.seconds.values()) + run.rest_s == pytest.approx(run.step_s)


@pytest.mark.parametrize("made", [Made(has_numbers=False), Made(hangs_at=0.0)])
def test_a_run_without_steps_says_so(made: Made) -> None:
    with pytest.raises(LaunchError, match="its events tell of 0 steps of an engine, and it takes 3; run it"):
        told(made)


def test_the_first_report_counts_only_where_there_is_no_other() -> None:
    recent = RecentSteps(num_lines=3)
    recent.add({"steps": 1, "step_s": 9.0, "forward_s": 8.0})
    number, times = recent.settled()
    assert (number, times and times.step_s) == (1, 9.0)
    for _ in range(3):
        recent.add({"steps": 4, "step_s": 4.0, "forward_s": 2.0})
        number, times = recent.settled()
        assert times is not None
        assert (times.step_s, times.seconds("forward")) == (1.0, 0.5)
    assert number == 12
