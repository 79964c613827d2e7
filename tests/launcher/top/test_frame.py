"""Frames of the screen, as data."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dslaunch.launcher.run_state.run_state import RunState
from dslaunch.launcher.run_state.step_times import StepTimes
from dslaunch.launcher.top.bars import ASCII, BLOCKS, bar, spark, step_bar
from dslaunch.launcher.top.frame import Frame, make_frame
from dslaunch.launcher.top.once import glyphs_for
from dslaunch.launcher.top.spans import cut, num_columns, plain
from dslaunch.launcher.top.view import JobFacts, View
from tests.launcher.made_events import Made, events_of

RUNNING = JobFacts(name="pretrain", state="running")
SIZES = [(80, 24), (160, 50), (40, 12), (20, 3), (500, 200), (1, 1)]


def state_of(made: Made) -> RunState:
    state = RunState()
    for event in events_of(made):
        state.take(event)
    return state


def frame_of(
    state: RunState,
    facts: JobFacts = RUNNING,
    *,
    width: int = 80,
    height: int = 24,
    later_s: float = 1.0,
    **view: Any,
) -> Frame:
    return make_frame(state, facts, View(**view), width=width, height=height, now=state.at + later_s)


def text_of(frame: Frame) -> str:
    return "\n".join(plain(one).rstrip() for one in frame.lines)


MADE = {
    "ranks": Made(num_hosts=2, duration_s=20, straggler=5, total_steps=5000),
    "folded": Made(num_hosts=64, duration_s=9, straggler=77),
    "restarted": Made(duration_s=30, fails_at=(10, 20), cause="data", straggler=9),
    "lines": Made(duration_s=10, has_numbers=False, has_gpus=False),
    "hangs": Made(num_hosts=1, duration_s=40, hangs_at=20),
    "starts": Made(duration_s=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", list(MADE))
def test_a_frame_has_the_size_that_was_asked_for(name: str, size: tuple[int, int]) -> None:
    width, height = size
    keys = (("q", "quit"),)
    for by in ("", "hosts", "ranks"):
        frame = frame_of(state_of(MADE[name]), width=width, height=height, by=by, offset=3, keys=keys)
        assert len(frame.lines) == height
        assert max(num_columns(plain(one)) for one in frame.lines) <= width


def test_ranks_what_they_do_and_who_is_slow() -> None:
    state = state_of(MADE["ranks"])
    frame = frame_of(state, keys=(("q", "quit"), ("h", "hosts")))
    text = text_of(frame)
    lines = text.split("\n")
    assert lines[0].startswith("pretrain  running 20 s  2 hosts, 16 ranks")
    assert lines[1].startswith("step 38 of 5,000, 1 %   2.5 steps/s   2.62M tokens/s   33 min 5 s left")
    assert lines[2].startswith("loss    6.9")
    assert lines[4].startswith("rank 5 on gpu01 holds up the others by 88 ms in each step of 400 ms, 22 %: ")
    assert lines[5] == "    computes for 360 ms a step, others 280 ms"
    assert " ".join(lines[6].split()) == "rank host state step s/step of a step memory gpu waits for"
    row = next(one for one in lines if one.startswith("    0 gpu01"))
    assert "training       38  0.400s fffbbbbbbocccc" in row
    assert "rank 5 2" in row
    assert next(one for one in lines if one.startswith("    5 gpu01")).rstrip("567%").endswith("others ")
    assert lines[-1].startswith(" q quit  h hosts")
    assert lines[-1].endswith("rows 1 to 14 of 16")
    assert (frame.num_rows, frame.num_shown) == (16, 14)
    assert "rank 5" in text_of(frame_of(state, by="hosts"))
    assert text_of(frame_of(state, by="hosts")).count("gpu0") == 3  # with the line on the slow rank


def test_more_columns_and_pictures_where_there_is_room() -> None:
    frame = frame_of(state_of(MADE["ranks"]), width=160, height=50)
    assert {"used", "cpu", "power"} <= set(frame.sorts)
    assert "f forward  b backward  o optimizer  c others  d data  p saving  - other" in text_of(frame)
    assert "dslaunch -H hosts --max_restarts 3 train.py --config 7b.yaml" in text_of(frame)
    assert set(frame_of(state_of(MADE["ranks"]), width=40).sorts) < set(frame.sorts)


def test_large_jobs_are_shown_by_host() -> None:
    text = text_of(frame_of(state_of(MADE["folded"]), by="ranks"))
    assert "64 hosts, 512 ranks" in text
    assert "rank 77 on gpu10 holds up the others" in text
    assert next(one for one in text.split("\n") if one.startswith("gpu10")).endswith("has rank 77")


def test_rows_are_sorted_by_a_column() -> None:
    state = state_of(MADE["ranks"])
    by_own = text_of(frame_of(state, sort="of a step")).split("\n")
    assert by_own[7].startswith("    5 gpu01")
    assert "*of a step" in by_own[6]
    waiting = text_of(frame_of(state, sort="waits for", height=40)).split("\n")
    assert [one for one in waiting if " gpu0" in one][-1].startswith("    5 gpu01")
    scrolled = text_of(frame_of(state, offset=99)).split("\n")
    assert scrolled[7].startswith("    2 gpu01")  # the last row is at the bottom


@pytest.mark.parametrize(("duration_s", "is_known"), [(20, False), (30, True)])
def test_that_no_rank_is_slow_is_known_after_a_while(duration_s: float, is_known: bool) -> None:
    text = text_of(frame_of(state_of(Made(num_hosts=1, duration_s=duration_s))))
    assert ("no rank is slower than the others" in text) == is_known


def test_a_long_sentence_has_two_lines() -> None:
    narrow = text_of(frame_of(state_of(MADE["ranks"]), width=40)).split("\n")
    assert narrow[4].startswith("rank 5 on gpu01 holds up the others")
    assert narrow[5].endswith(" ~")


def test_restarts_and_notes() -> None:
    text = text_of(frame_of(state_of(MADE["restarted"])))
    assert "attempt 3" in text.split("\n")[0]
    said = "attempt 2, 9.0 s: rank 31 on spare-1 (local rank 7, pid 4031) exited with code"
    assert f"{said}\n    1: torch.OutOfMemoryError: CUDA out of memory." in text
    assert "attempt 1, 11 s" not in text
    assert "attempt 1, 11 s" in text_of(frame_of(state_of(MADE["restarted"]), height=50))
    assert "all 32 workers run" in text


def test_a_job_without_numbers_shows_lines_a_second() -> None:
    text = text_of(frame_of(state_of(MADE["lines"])))
    assert "its ranks tell no steps" in text or "no step yet" in text
    assert "\nlines/s " in text
    assert text.split("\n")[3].split() == ["rank", "host", "state", "cpu", "lines/s"]


def test_a_job_that_hangs_or_only_starts() -> None:
    text = text_of(frame_of(state_of(MADE["hangs"]), later_s=3))
    assert "no step for 24 s" in text
    assert "hangs, said rank 3 23 s ago: all_reduce of 4.2 MB waits for rank 5" in text
    assert "    3 gpu01 hangs " in text
    assert "    0 gpu01 no step " in text
    state = RunState()
    for event in events_of(MADE["starts"]):
        if event["event"] in ("job", "attempt", "phase"):
            state.take(event)
    assert "starts for" in text_of(frame_of(state))
    assert "connected" in text_of(frame_of(state))
    assert " 0 gpu01 starting" in text_of(frame_of(state))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (JobFacts(name="a", state="ended", is_live=False, exit_code=0), "ended with exit code 0"),
        (
            JobFacts(name="a", state="ended", is_live=False, exit_code=3, verdict="rank 1 exited"),
            "ended with exit code 3: rank 1 exited",
        ),
        (
            JobFacts(name="a", state="lost", is_live=False, why="its dslaunch was killed"),
            "its dslaunch was killed",
        ),
        (JobFacts(name="a", state="running", has_events=False), "this job has no events yet"),
    ],
)
def test_the_record_says_how_it_ended(facts: JobFacts, said: str) -> None:
    assert text_of(frame_of(RunState(), facts)).split("\n")[1] == said


def taken(*events: dict[str, Any]) -> RunState:
    """What is known of a job of one rank after these events, one a second."""
    state = RunState()
    job = {"event": "job", "name": "a", "command": ["dslaunch", "a.py"]}
    attempt = {"event": "attempt", "attempt": 0, "workers": [["node1", 0, 0, 0]], "log_folder": ""}
    for at, event in enumerate((job, attempt, *events), 1):
        state.take({"at": float(at), **event})
    return state


RUNS = {"event": "running", "attempt": 0}
STEP = {
    "event": "metrics",
    "ranks": {"0": {"step": 20, "total_steps": -1}},
    "hosts": {"node1": {}},
    "lines": {},
}


def test_a_number_of_steps_that_is_none_is_no_end() -> None:
    """Programs have -1 for no limit, and tell it."""
    second = text_of(frame_of(taken(RUNS, STEP))).split("\n")[1]
    assert second == "step 20"


def test_an_attempt_that_has_just_begun_has_no_step_yet() -> None:
    """Though the ranks of the attempt before told steps."""
    again = {"event": "attempt", "attempt": 1, "workers": [["node1", 0, 0, 0]], "log_folder": ""}
    state = taken(RUNS, STEP, again, {**RUNS, "attempt": 1})
    assert "no step yet" in text_of(frame_of(state)).split("\n")[1]
    assert "tell no steps" in text_of(frame_of(state, later_s=30)).split("\n")[1]


def test_a_job_whose_end_is_told_to_others_has_ended() -> None:
    """Its process is there for as long as --on_end and --webhook run."""
    state = taken(RUNS, {"event": "end", "exit_code": 3, "duration_s": 2.0})
    second = text_of(frame_of(state)).split("\n")[1]
    assert second == "ended with exit code 3; --on_end or --webhook may still run"


def test_a_screen_without_room_for_rows_counts_none() -> None:
    for height in range(1, 12):
        assert "rows 1 to 0" not in text_of(
            frame_of(state_of(MADE["ranks"]), height=height, keys=(("q", "quit"),))
        )


def test_a_job_that_is_gone_has_no_ranks_that_train() -> None:
    state = state_of(MADE["ranks"])
    text = text_of(frame_of(state, JobFacts(name="a", state="lost", is_live=False, why="killed")))
    assert "    5 gpu01 gone " in text
    assert "training" not in text
    assert "others wait" not in text


def test_text_of_others_steers_no_terminal() -> None:
    state = state_of(MADE["ranks"])
    for event in (
        {"event": "note", "at": state.at, "level": 40, "text": "\x1b[2J\x07 wide 日本語 \udcff\n\ttab" * 20},
        {"event": "metrics", "at": state.at, "ranks": {"0": {"state": "\x1b]0;title\x07"}}},
        {"event": "straggler", "at": state.at, "rank": 1, "host": "a\x1b[31mb", "text": "\x9b2J"},
    ):
        state.take(event)
    frame = frame_of(state)
    text = text_of(frame)
    assert "wide 日本語" in text
    assert all(one.isprintable() or one == "\n" for one in text)
    assert max(num_columns(plain(one)) for one in frame.lines) <= 80


def test_losses_that_are_no_numbers() -> None:
    state = state_of(MADE["ranks"])
    row = {str(rank): {"step": 99, "steps": 1, "step_s": 0.4, "loss": "nan"} for rank in range(16)}
    state.take({"event": "metrics", "at": state.at + 1, "ranks": row, "hosts": {}, "lines": {}})
    assert "\nloss    nan" in text_of(frame_of(state))


def test_bars() -> None:
    assert [bar(one, 4, BLOCKS) for one in (0, 0.3, 1, 7)] == ["░░░░", "█▎░░", "████", "████"]
    assert bar(0.5, 4, ASCII) == "##.."
    times = StepTimes([1.0, 0.25, 0.5, 0.0, 0.125, 0.0, 0.0])
    assert plain(step_bar(times, 8)) == "ffbbbbc-"
    assert (
        plain(step_bar(StepTimes([1.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]), 4)) == "ffbb"
    )  # more than the step: phases that overlap
    assert spark([1, 2, 3], 4, 1, BLOCKS, low=1) == [" ▁▅█"]
    assert spark([0, 4], 2, 2, ASCII, low=0) == [" #", ".#"]
    assert spark([math.nan], 2, 1, BLOCKS, low=math.nan) == ["  "]
    assert spark([5.0] * 100, 3, 1, BLOCKS, low=5.0) == ["▅▅▅"]
    assert cut("日本語", 4) == "日~"
    assert glyphs_for("ascii") is ASCII
    assert glyphs_for("utf-8") is BLOCKS
