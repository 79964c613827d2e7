"""What the events of a run say of it, and that nothing of a writer's faults comes through."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from dslaunch.launcher.run_state.run_state import MAX_ATTEMPTS, MAX_NOTES, RunState
from dslaunch.launcher.run_state.slowest import slowest
from tests.launcher.made_events import BEGAN_AT, Made, events_of


def state_of(made: Made, **given: Any) -> RunState:
    state = RunState(**given)
    for event in events_of(made):
        state.take(event)
    return state


def test_a_run_of_four_hosts() -> None:
    state = state_of(Made(total_steps=1000), num_rank_points=50)
    assert state.job.name == "pretrain"
    assert state.job.command[:2] == ("dslaunch", "-H")
    assert len(state.ranks) == 32
    assert list(state.hosts) == ["gpu01", "gpu02", "gpu03", "gpu04"]
    assert state.step is not None
    assert state.step_s == pytest.approx(0.4)
    assert state.left_s == pytest.approx((1000 - state.step) * 0.4)
    assert state.last("steps_per_s") == pytest.approx(2.5)
    assert state.last("tokens_per_s") == pytest.approx(2 * 512 * 2048)  # made_events: two steps in a second
    rank = state.ranks[9]
    assert (rank.host, rank.local_rank, rank.pid) == ("gpu02", 1, 4009)
    times = rank.times
    assert times is not None
    assert times.step_s == pytest.approx(times.other_s + sum(times[1:]), abs=0.01)
    assert rank.series["step_s"].last == pytest.approx(0.4)  # of one step, not of a line
    assert state.hosts["gpu01"].series["cpu"].last == pytest.approx(0.35, abs=0.06)
    assert state.config[0] == {"zero_optimization": {"stage": 3}}
    attempt = state.attempt
    assert attempt is not None
    assert [one.name for one in attempt.phases][:2] == ["agent", "connected"]
    assert all(one.ended_at > one.began_at for one in attempt.phases)
    assert attempt.running_at == attempt.phases[-1].ended_at


def test_the_loss_of_the_run_is_the_mean_of_all_ranks_though_some_tell_later() -> None:
    state = RunState()
    state.take({"event": "attempt", "at": 1, "workers": [["a", 0, 0, 0], ["a", 0, 1, 1]]})
    told: tuple[dict[str, float], ...] = ({"0": 1.0, "1": 3.0}, {"0": 1.0}, {"1": 3.0})
    for at, losses in enumerate(told, start=2):
        rows = {rank: {"step": at, "loss": loss} for rank, loss in losses.items()}
        state.take({"event": "metrics", "at": at, "ranks": rows})
    assert [value for _, value in state.recent("loss")] == [2.0, 2.0, 2.0]


def test_restarts_their_culprits_and_the_end() -> None:
    state = state_of(Made(duration_s=100, fails_at=(30, 60), exit_code=0))
    verdicts = [one.verdict for one in state.attempts]
    culprits = [one.culprit for one in verdicts if one is not None]
    said = "rank 9 on gpu02 ended with exit code 1: RuntimeError: CUDA error: unspecified launch failure"
    assert culprits == [said, said, ""]
    assert [len(one.exits) for one in state.attempts] == [32, 32, 32]
    assert state.exit_code == 0
    assert state.left_s is None
    assert all(one.exit_code == 0 for one in state.ranks.values())


def test_ranks_that_are_told_of_together() -> None:
    state = state_of(Made(num_hosts=64, duration_s=20, straggler=77))
    assert len(state.ranks) == 512
    assert len(state.folded) == 64
    folded = state.folded["gpu10"]
    waits = folded.per_step("comm_s")
    assert waits is not None
    assert waits.rank_of_least == 77
    assert waits.least < waits.mean < waits.most < 0.4
    assert folded.times is not None
    assert folded.times.step_s == pytest.approx(0.4)
    found = slowest(state)
    assert found is not None
    assert (found.rank, found.host, found.cause) == (77, "gpu10", "compute")


@pytest.mark.parametrize("cause", ["compute", "data"])
@pytest.mark.parametrize("num_hosts", [2, 16])
def test_the_slowest_rank_and_why(cause: str, num_hosts: int) -> None:
    found = slowest(state_of(Made(num_hosts=num_hosts, duration_s=30, straggler=5, cause=cause)))
    assert found is not None
    assert (found.rank, found.host, found.cause) == (5, "gpu01", cause)


@pytest.mark.parametrize("num_hosts", [1, 16])
def test_equal_ranks_have_no_slowest(num_hosts: int) -> None:
    assert slowest(state_of(Made(num_hosts=num_hosts, duration_s=30))) is None


def test_a_straggler_that_was_said_counts_until_it_is_well_again() -> None:
    state = state_of(Made(num_hosts=1, duration_s=60, straggler=5, is_said=True))
    found = slowest(state)
    assert found is not None
    assert (found.rank, found.is_said) == (5, True)
    assert found.why.startswith("rank 5 on gpu01 holds up the others by 88 ms in each step of 400 ms, 22 %: ")
    for event in events_of(Made(num_hosts=1, duration_s=200, began_at=BEGAN_AT + 60)):
        if event["event"] == "metrics":
            state.take(event)
    assert slowest(state) is not None
    state.take({"at": state.at, "event": "straggler_over", "rank": 5, "host": "gpu01", "cause": "compute"})
    assert slowest(state) is None


def test_a_rank_that_saves_is_not_the_slowest() -> None:
    state = state_of(Made(num_hosts=1, duration_s=30, straggler=5))
    state.take({"at": state.at + 1, "event": "metrics", "ranks": {"5": {"state": "saving"}}, "hosts": {}})
    assert state.ranks[5].doing == "saving"
    assert slowest(state) is None
    row = {"steps": 1, "step": 99, "step_s": 0.4}
    state.take({"at": state.at + 1, "event": "metrics", "ranks": {"5": row}, "hosts": {}})
    assert state.ranks[5].doing == ""


@pytest.mark.parametrize("num_hosts", [1, 16])
def test_a_step_in_which_one_rank_saved_names_no_rank(num_hosts: int) -> None:
    state = RunState()
    for event in events_of(Made(num_hosts=num_hosts, duration_s=20)):
        if event["event"] == "metrics" and num_hosts == 1:
            for row in event["ranks"].values():
                row["step_s"], row["comm_s"] = row["step_s"] + 1.0, row["comm_s"] + 1.0
            saving = event["ranks"]["3"]
            saving.update(comm_s=saving["comm_s"] - 1.0, paused_s=1.0)
        elif event["event"] == "metrics":
            event["ranks"]["gpu01 *"].update(own_s=[0.5, 0.6, 1.6, 1, 3], paused_s=[0.0, 0.1, 1.0, 0, 3])
        state.take(event)
    assert slowest(state) is None


def test_a_job_without_numbers_has_lines() -> None:
    state = state_of(Made(has_numbers=False, duration_s=20))
    assert not state.has_numbers
    assert state.step is None
    assert state.num_lines > 0
    assert state.last("lines_per_s") is not None


def test_steps_that_a_program_counts_itself_have_a_rate() -> None:
    """By dslaunch.report(step=...) alone."""
    state = state_of(Made(num_hosts=1, duration_s=4, has_numbers=False))
    for second in range(10):
        row = {"0": {"step": second * 3}}
        state.take({"at": BEGAN_AT + 10 + second, "event": "metrics", "ranks": row, "hosts": {}, "lines": {}})
    assert state.last("steps_per_s") == pytest.approx(3)
    assert state.step_s == pytest.approx(1 / 3)


HOSTILE: list[Any] = [
    {},
    {"event": "metrics"},
    {"event": "metrics", "ranks": [], "hosts": 3, "lines": "x"},
    {"event": "metrics", "ranks": {"0": 3, "x": {}, "9999999999999": {}, "1": {"loss": [1], "step": "no"}}},
    {"event": "metrics", "ranks": {"2": {"step": "inf", "loss": "nan", "step_s": -5, "steps": 1}}},
    {"event": "metrics", "ranks": {"gpu01 *": {"loss": [1, 2], "step": ["a"] * 5}, "nohost *": {"loss": 1}}},
    {"event": "metrics", "hosts": {"gpu01": {"gpus": "many"}, "gpu02": {"gpus": [1, {"util": "x"}]}}},
    {"event": "metrics", "lines": {"0": "many", "-1": 4, "1": 10**400}},
    {"event": "attempt", "attempt": "second", "workers": [["h"], None, ["h", 1, True, 0], ["h", 0, 0, 0]]},
    {"event": "phase", "phase": 7, "began_at": "early"},
    {"event": "started", "rank": "zero"},
    {"event": "exited", "rank": 10**30, "code": None},
    {"event": "verdict", "culprit": "a word", "duration_s": None},
    {"event": "verdict", "culprit": {"kind": "rank", "traceback": [None, ""], "signal": "x"}},
    {"event": "straggler", "rank": None},
    {"event": "straggler_over", "rank": [5]},
    {"event": "straggler", "rank": 2, "share": "nan", "text": 5},
    {"event": "hang", "rank": None, "report": {"a": 1}},
    {"event": "stacks", "title": 1, "lines": "abc"},
    {"event": "note", "level": "loud", "text": None},
    {"event": "config", "rank": "x", "config": []},
    {"event": "lost", "events": "some"},
    {"event": "of the next version", "at": 5},
    {"event": "end", "exit_code": "well"},
    {"event": ["job"], "at": "now"},
    {"event": "job", "at": "nan", "command": "one word", "name": None},
]


def test_whatever_an_event_has_nothing_is_raised() -> None:
    events = [
        json.loads(json.dumps(one)) for one in events_of(Made(num_hosts=2, duration_s=8, fails_at=(4,)))
    ]
    state = RunState(num_rank_points=8)
    for event in events:
        state.take(event)
        for hostile in HOSTILE:
            state.take(hostile)
            slowest(state)
    assert state.num_unknown == 3 * len(events)
    assert math.isfinite(state.at)


def test_nothing_grows_without_end() -> None:
    state = RunState(num_points=16, num_rank_points=8)
    for event in events_of(Made(num_hosts=1, slots=2, duration_s=1500)):
        state.take(event)
    for number in range(2000):
        state.take({"event": "note", "at": 1.0, "text": "again"})
        state.take({"event": "attempt", "at": 1.0, "attempt": number + 1, "workers": [["h", 0, 0, 0]]})
        state.take({"event": "stacks", "at": 1.0, "title": "", "lines": []})
        state.take({"event": "metrics", "at": 2.0, "ranks": {"0": {f"name{number}": 1.0}}})
    assert all(len(one) <= 16 for one in state.series.values())
    assert len(state.recent("loss")) <= 600
    assert len(state.notes) == MAX_NOTES
    assert len(state.attempts) == MAX_ATTEMPTS
    assert state.num_stacks == 2000
    assert len(state.ranks) == 1
