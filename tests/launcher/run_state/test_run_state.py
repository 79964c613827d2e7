"""What the events of a run say of it, and that nothing of a writer's faults comes through."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from dslaunch.launcher.run_state.metric_table import OTHER, PHASES
from dslaunch.launcher.run_state.rank_state import MAX_NAMES
from dslaunch.launcher.run_state.run_state import MAX_ATTEMPTS, NOTES, RECENT_S, RunState
from dslaunch.launcher.run_state.series import MAX_POINTS
from tests.launcher.made_events import BEGAN_AT, OUT_OF_MEMORY, Made, events_of, straggler_of


def state_of(made: Made) -> RunState:
    state = RunState()
    for event in events_of(made):
        state.take(event)
    return state


def test_a_run_of_four_hosts() -> None:
    state = state_of(Made(total_steps=1000))
    assert state.job.name == "pretrain"
    assert state.job.command[:2] == ("dslaunch", "-H")
    assert len(state.ranks) == 32
    assert list(state.hosts) == ["gpu01", "gpu02", "gpu03", "gpu04"]
    assert state.step is not None
    assert state.step == state.last_step
    assert state.step_s == pytest.approx(0.4)
    assert state.left_s == pytest.approx((1000 - state.step) * 0.4)
    assert state.last("steps_per_s") == pytest.approx(2.5)
    assert state.last("tokens_per_s") == pytest.approx(2.5 * 512 * 2048)
    rank = state.ranks[9]
    assert (rank.host, rank.local_rank, rank.pid) == ("gpu02", 1, 4009)
    times = rank.times
    assert times is not None
    parts = [times.seconds(phase) for phase in (*PHASES, OTHER)]
    assert sum(parts) == pytest.approx(times.step_s)
    assert state.hosts["gpu01"].values["gpu_power_w"] == sum(
        gpu["power_w"] for gpu in state.hosts["gpu01"].gpus
    )
    assert state.configs[0]["zero_optimization"]["stage"] == 3
    attempt = state.attempt
    assert attempt is not None
    assert [one.name for one in attempt.phases][:2] == ["agent", "connected"]
    assert attempt.running_at == attempt.phases[5].ended_at


def test_the_loss_of_the_run_is_the_mean_of_all_ranks_though_some_tell_later() -> None:
    state = RunState()
    state.take({"event": "attempt", "at": 1, "workers": [["a", 0, 0, 0], ["a", 0, 1, 1]]})
    told: tuple[dict[str, float], ...] = ({"0": 1.0, "1": 3.0}, {"0": 1.0}, {"1": 3.0})
    for at, losses in enumerate(told, start=2):
        rows = {rank: {"step": at, "loss": loss} for rank, loss in losses.items()}
        state.take({"event": "metrics", "at": at, "ranks": rows})
    assert [one.mean for one in state.loss.points()] == [2.0, 2.0, 2.0]
    assert state.last_loss == 1.0, "of rank 0"


def test_a_rank_with_many_names_keeps_those_it_told_first_up_to_date() -> None:
    state = RunState()
    state.take({"event": "attempt", "at": 1, "workers": [["a", 0, 0, 0]]})
    names = [f"n{number}" for number in range(MAX_NAMES + 1)]
    for at, told in enumerate((names[:-1], names), start=2):
        state.take({"event": "metrics", "at": at, "ranks": {"0": dict.fromkeys(told, float(at))}})
    assert state.ranks[0].values == dict.fromkeys(names[:-1], 3.0)


def test_restarts_their_culprits_and_the_end() -> None:
    state = state_of(Made(duration_s=100, fails_at=(30, 60), exit_code=0))
    said = f"rank 31 on gpu04 (local rank 7, pid 4031) exited with code 1: {OUT_OF_MEMORY}"
    texts = [one.verdict.text for one in state.attempts.values() if one.verdict is not None]
    assert texts == [said, said.replace("gpu04", "spare-1"), "exit code 0"]
    assert [(len(one.exits), one.num_exits) for one in state.attempts.values()] == [(32, 32)] * 3
    assert (state.num_attempts, state.num_failed_attempts, state.exit_code) == (3, 2, 0)
    assert state.left_s is None
    assert all(one.exit_code == 0 for one in state.ranks.values())


def test_of_older_events_without_sentences_it_is_said_who_it_was() -> None:
    state = RunState()
    rank = {"kind": "rank", "rank": 3, "host": "b", "code": 7}
    host = {"kind": "host", "host": "c", "message": "it is lost"}
    for number, culprit in enumerate((rank, host, None)):
        verdict = {"attempt": number, "exit_code": 7, "culprit": culprit, "hosts": ["b", "c"]}
        state.take({"event": "verdict", "at": 1.0, **verdict})
    texts = [one.verdict.text for one in state.attempts.values() if one.verdict is not None]
    assert texts == ["rank 3 on b: exit code 7", "c: it is lost", "exit code 7"]
    assert state.attempts[0].hosts == ("b", "c"), "nothing else was told of it"


def test_ranks_that_are_told_of_together() -> None:
    state = state_of(Made(num_hosts=64, duration_s=20, straggler=77))
    assert len(state.ranks) == 512
    assert len(state.folded) == 64
    folded = state.folded["gpu10"]
    waits = dict(folded.spreads())["comm_s"]
    assert (waits.low_key, waits.weight) == ("77", 8)
    assert waits.low < waits.mean < waits.high
    assert folded.times is not None
    assert folded.times.step_s == pytest.approx(0.4)
    assert folded.times.share("comm") == pytest.approx(waits.mean / dict(folded.spreads())["step_s"].mean)


def test_a_straggler_counts_until_it_is_well_again() -> None:
    made = Made(num_hosts=1, duration_s=60, straggler=5)
    state = state_of(made)
    assert state.straggler is not None
    assert (state.straggler.rank, state.straggler.host) == (5, "gpu01")
    worse = {**straggler_of(Made(num_hosts=1, straggler=2), state.at), "share": 0.5}
    state.take({**worse, "text": None})
    assert state.straggler.text == "rank 2 on gpu01 holds up the others: compute"
    for rank, cause, left in ((5, "data", 2), (2, "compute", 5), (5, "compute", None)):
        state.take({"at": state.at, "event": "straggler_over", "rank": rank, "cause": cause})
        assert (None if state.straggler is None else state.straggler.rank) == left
    assert all(one.over_at for one in state.stragglers)
    state.take(worse)
    state.take({"at": state.at, "event": "attempt", "attempt": 1, "workers": made.workers(1)})
    assert state.straggler is None


def test_a_rank_that_saves_does_so_until_it_tells_something_else() -> None:
    state = state_of(Made(num_hosts=1, duration_s=30))
    for row, doing in (({"state": "saving"}, "saving"), ({"steps": 1, "step": 99, "step_s": 0.4}, "")):
        state.take({"at": state.at + 1, "event": "metrics", "ranks": {"5": row}, "hosts": {}})
        assert state.ranks[5].doing == doing


def test_a_job_without_numbers_has_lines() -> None:
    state = state_of(Made(has_numbers=False, duration_s=20))
    assert not state.has_numbers
    assert state.step is None
    assert state.num_lines > 0
    assert state.last("lines_per_s") is not None


def test_steps_that_a_program_counts_itself_have_a_rate() -> None:
    """By dslaunch.report(step=...) alone."""
    state = state_of(Made(num_hosts=1, duration_s=4, has_numbers=False))
    for second in range(12):
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
    state = RunState()
    for event in events:
        state.take(event)
        for hostile in HOSTILE:
            state.take(hostile)
            assert state.straggler is None or state.straggler.text
    assert state.num_unknown == 3 * len(events)
    assert math.isfinite(state.at)


def test_nothing_grows_without_end() -> None:
    state = RunState()
    for event in events_of(Made(num_hosts=1, slots=2, duration_s=1500)):
        state.take(event)
    for number in range(2000):
        state.take({"event": "note", "at": 1.0, "text": "again"})
        state.take({"event": "attempt", "at": 1.0, "attempt": number + 1, "workers": [["h", 0, 0, 0]]})
        state.take({"event": "stacks", "at": 1.0, "title": "", "lines": []})
        state.take({"event": "metrics", "at": 2.0, "ranks": {"0": {f"name{number}": 1.0}}})
    assert len(state.loss.points()) <= MAX_POINTS
    assert len(state.recent("steps_per_s")) <= RECENT_S
    assert (len(state.notes), state.stacks.num) == (sum(NOTES), 2000)
    assert (len(state.attempts), state.num_attempts) == (MAX_ATTEMPTS, 2001)
    assert len(state.ranks) == 1
