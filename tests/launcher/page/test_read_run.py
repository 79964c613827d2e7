"""What files say of a run, whatever state they are in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.page.curves import Shares
from dslaunch.launcher.page.read_run import RunSource, find_source, read_run
from dslaunch.launcher.page.run import Run
from tests.launcher.made_events import BEGAN_AT, GIB, Made, as_lines, events_of, write_events


def run_of(path: Path) -> Run:
    source = find_source(str(path))
    assert source is not None
    return read_run(source)


def small(**given: Any) -> Made:
    """Of 50 steps in 30 s, and 46 in 28 s."""
    known = {"num_hosts": 2, "slots": 2, "duration_s": 60.0, "fails_at": (30.0,), "step_s": 0.5}
    return Made(**{**known, "straggler": 1, "exit_code": 0, **given})


@pytest.mark.parametrize("has_engine", [True, False])
def test_the_rates_of_a_steady_run_are_steady(has_engine: bool, tmp_path: Path) -> None:
    """Steps of 1.3 s of two ranks, told once a second by whichever has made one since."""
    workers = [["a", 0, 0, 0], ["a", 0, 1, 1]]
    events: list[dict[str, Any]] = [{"at": BEGAN_AT, "event": "attempt", "attempt": 0, "workers": workers}]
    told = [0, 0]
    for second in range(1, 121):
        ranks = {}
        for rank in range(2):
            step = int((second - 0.4 * rank) / 1.3)
            if step > told[rank]:
                row = {"step": step, "samples": 64 * step, "loss": 1.0 + rank + 1 / step}
                timed = {"steps": step - told[rank], "step_s": 1.3 * (step - told[rank])}
                ranks[str(rank)] = row | (timed if has_engine else {})
                told[rank] = step
        events.append({"at": BEGAN_AT + second, "event": "metrics", "attempt": 0, "ranks": ranks})
    (tmp_path / "events").write_bytes(as_lines(events))
    run = run_of(tmp_path / "events")
    near = pytest.approx(1 / 1.3, rel=0.01 if has_engine else 0.15)
    points = run.curves.over_time["steps_per_s"].points()
    assert len(points) >= 8
    assert [one.mean for one in points] == [near] * len(points)
    samples = [one.mean / 64 for one in run.curves.over_time["samples_per_s"].points()]
    assert samples == [near] * len(samples)
    assert run.state.last_loss == 1.0 + 1 / told[0], "rank 0's, as the console says"


def test_all_of_a_run_is_there(tmp_path: Path) -> None:
    write_events(tmp_path / "20260801-160000" / "events.jsonl", small())
    (tmp_path / "latest").symlink_to("20260801-160000")
    run = run_of(tmp_path)
    assert run.label == "20260801-160000"
    assert run.exit_code == 0
    assert run.problems == []
    assert [one.hosts for one in run.attempts] == [("gpu01", "gpu02"), ("gpu01", "spare-1")]
    first = run.attempts[0]
    assert first.verdict is not None
    assert first.verdict.culprit["rank"] == 3
    assert first.running_at - first.began_at == pytest.approx(3)
    assert first.phases[-1].name == "process group"
    assert run.state.ranks[3].host == "spare-1"
    assert run.state.last_step == 96
    curves = run.curves
    assert curves.over_time["loss"].points()[-1].mean == pytest.approx(5.65, abs=0.05)
    assert curves.over_time["steps_per_s"].points()[0].mean == pytest.approx(2.0)
    (_, _, step) = next(iter(curves.shares.points()))
    assert step["forward_s"] == pytest.approx(0.1075)
    assert sum(step.values()) == pytest.approx(0.5)
    own = curves.over_time["own_s"].points()[-1]
    assert (own.high_key, own.high) == ("1", pytest.approx(0.47))
    totals = curves.totals["0"]
    assert totals.steps == 96
    assert totals.peak == 66 * GIB
    assert curves.hosts["gpu01"].num_gpus == 2
    assert curves.hosts["gpu01"].last["cores"] == 96
    assert run.state.configs[0]["zero_optimization"]["stage"] == 3
    assert [one.cause for one in run.state.stragglers] == ["compute", "compute"]
    assert len(run.state.stacks) == 2
    assert run.state.num_lines == 4 * 48


def test_folded_ranks_are_those_of_their_hosts(tmp_path: Path) -> None:
    made = small(num_hosts=32, slots=4, straggler=77, has_gpus=False)
    run = run_of(write_events(tmp_path / "events", made))
    assert run.num_ranks == 128
    assert set(run.curves.totals) == {f"{host} *" for host in (*made.hosts(), "spare-1")}
    last = run.curves.over_time["own_s"].points()[-1]
    assert last.high_key == "77"
    assert last.mean == pytest.approx(0.37 + 0.1 / 128)
    assert run.curves.over_time["accuracy"].points()[-1].mean == pytest.approx(0.77, abs=0.01)


def test_a_straggler_is_one_until_it_is_well_again(tmp_path: Path) -> None:
    who = {"rank": 1, "host": "worker-1", "cause": "compute"}
    events = [
        {"event": "job", "name": "t"},
        {"event": "straggler", **who, "share": 0.3, "over_at": "x"},
        {"event": "straggler_over", **who, "cause": "data"},
        {"event": "straggler_over", **who},
        {"event": "straggler", **who, "share": 0.2},
    ]
    path = tmp_path / "events"
    path.write_bytes(as_lines([{"at": BEGAN_AT + place, **one} for place, one in enumerate(events)]))
    first, second = run_of(path).state.stragglers
    assert (first.over_at, second.over_at) == (BEGAN_AT + 3, 0.0)


def test_a_state_lasts_until_the_rank_tells_something_else(tmp_path: Path) -> None:
    """A save of 9 s between the steps of two ranks, a short one, and one in which the attempt ends."""
    saving, step = {"state": "saving"}, {"step": 1, "steps": 1, "step_s": 1.0}
    told: list[tuple[int, dict[str, Any]]] = [
        (1, {"0": step, "1": step}),
        (2, {"0": saving}),
        (3, {"1": {**step, **saving}}),
        (11, {"1": step}),
        (12, {"0": step}),
        (14, {"0": saving, "1": {"state": "loading"}}),
        (15, {"0": step, "1": step}),
        (20, {"0": saving}),
        (31, {"0": step}),
    ]
    lines: list[dict[str, Any]] = [
        {"at": BEGAN_AT + at, "event": "metrics", "attempt": int(at > 30), "ranks": ranks}
        for at, ranks in told
    ]
    starts = [
        {
            "at": BEGAN_AT + at,
            "event": "attempt",
            "attempt": number,
            "workers": [["a", 0, 0, 0], ["a", 0, 1, 1]],
        }
        for number, at in enumerate((0, 30))
    ]
    (tmp_path / "events").write_bytes(as_lines([starts[0], *lines[:-1], starts[1], lines[-1]]))
    assert run_of(tmp_path / "events").curves.states == [
        (2.0, 12.0, "saving"),
        (14.0, 15.0, "saving"),
        (14.0, 15.0, "loading"),
        (20.0, 20.0, "saving"),
    ]


def test_what_the_hosts_say_of_folded_ranks_is_taken(tmp_path: Path) -> None:
    row = {"steps": [2, 2, 2, 0, 1], "step_s": [1, 1, 1, 0, 1], "comm_s": [0, 0.2, 0.4, 0, 1]}
    row["own_s"] = [0.6, 0.8, 1.0, 9, 8]
    events: list[dict[str, Any]] = [
        {"at": BEGAN_AT, "event": "attempt", "attempt": 0, "workers": [["a", 0, 0, 0], ["a", 0, 1, 1]]},
        {
            "at": BEGAN_AT + 1,
            "event": "metrics",
            "attempt": 0,
            "ranks": {"a *": row},
            "hosts": {},
            "lines": {},
        },
    ]
    (tmp_path / "events").write_bytes(as_lines(events))
    (point,) = run_of(tmp_path / "events").curves.over_time["own_s"].points()
    assert (point.low, point.mean, point.high) == pytest.approx((0.3, 0.4, 0.5))
    assert (point.low_key, point.high_key) == ("9", "8")


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_a_file_that_is_cut_shows_what_is_left(tmp_path: Path, share: float) -> None:
    path = write_events(tmp_path / "events.jsonl", small())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    run = run_of(path)
    assert run.exit_code is None
    assert run.curves.over_time["loss"]
    assert any("has no end" in one for one in run.problems)


def test_what_is_no_event_is_counted_and_left_out(tmp_path: Path) -> None:
    path = write_events(tmp_path / "events.jsonl", small())
    good = path.read_bytes()
    bad = [
        b"no json\n",
        b"[1]\n",
        b"\0\xff\n",
        b'{"event": 3}\n',
        b"[" * 5000 + b"\n",
        b'{"at":1,"event":"of a later version"}\n',
        b'{"at":"x","event":"attempt","workers":7}\n',
        b'{"event":"verdict","attempt":[],"culprit":7,"others":{}}\n',
        b'{"event":"straggler","rank":{},"host":4,"share":"nan"}\n',
        b'{"at":1e400,"event":"note","level":"x","text":7}\n',
        b'{"event":"metrics","ranks":{"0":{"loss":[1,2],"lr":true,"step":"inf","grad_norm":1e400},"x":{"loss":1}},'
        b'"hosts":{"h":{"cpu":"a","gpus":[1,{"util":null}]}},"lines":{"0":"x","1":null}}\n',
    ]
    path.write_bytes(good.replace(b"\n", b"\n" + b"".join(bad), 1))
    run = run_of(path)
    assert run.exit_code == 0
    assert any("5 lines of the events could not be read" in one for one in run.problems)
    assert any("unknown kinds" in one and "of a later version" in one for one in run.problems)


def test_two_files_of_a_job_are_one_run(tmp_path: Path) -> None:
    events = list(events_of(small()))
    opening = [one for one in events if one["event"] in ("job", "attempt", "config")]
    middle = len(events) // 3
    old, new = tmp_path / "events.old", tmp_path / "events"
    old.write_bytes(as_lines(events[:middle]))
    new.write_bytes(as_lines([opening[0], opening[1], opening[2], *events[middle:]]))
    run = read_run(RunSource(label="x", events=new))
    whole = run_of(write_events(tmp_path / "whole" / "events", small()))
    assert run.curves.totals["0"] == whole.curves.totals["0"]
    assert [one.number for one in run.attempts] == [0, 1]
    assert run.attempts[0].began_at == whole.attempts[0].began_at


def test_a_report_alone_is_enough(tmp_path: Path) -> None:
    attempts = [
        {
            "number": 0,
            "hosts": ["a", "b"],
            "began_at": "2026-08-01T16:00:00.000+00:00",
            "duration_s": 12.5,
            "exit_code": 1,
            "culprit": {"kind": "host", "host": "b", "message": "it is lost", "at_s": 1.0},
            "others": [],
            "interrupted_by": None,
            "phases_s": {"connected": 1.5, "started": 2.0, "ended": 12.0},
            "change": None,
            "decision": "no restarts are left",
        }
    ]
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**attempts[0], "attempts": attempts}, indent=2))
    run = run_of(path)
    assert run.exit_code == 1
    assert run.duration_s == pytest.approx(12.5)
    assert run.attempts[0].hosts == ("a", "b")
    assert [one.name for one in run.attempts[0].phases] == ["connected", "started"]
    assert run_of(tmp_path).exit_code == 1
    assert not run.state.has_numbers


def test_a_report_adds_what_the_events_do_not_have(tmp_path: Path) -> None:
    path = write_events(tmp_path / "events.jsonl", small(fails_at=()))
    events = [
        one for one in path.read_bytes().splitlines(True) if b'"verdict"' not in one and b'"end"' not in one
    ]
    path.write_bytes(b"".join(events))
    assert run_of(path).exit_code is None
    entry = {"number": 0, "hosts": ["gpu01"], "began_at": BEGAN_AT, "duration_s": 3.0, "exit_code": 5}
    (tmp_path / "report.json").write_text(json.dumps({"exit_code": 5, "attempts": [entry]}))
    run = run_of(path)
    assert run.exit_code == 5
    assert run.attempts[0].verdict is not None
    assert run.attempts[0].verdict.text == "exit code 5"
    (tmp_path / "report.json").write_text("{")
    assert any("report.json could not be read" in one for one in run_of(path).problems)


def test_a_job_without_numbers_has_its_lines(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"at": BEGAN_AT, "event": "job", "name": "t"},
        {"at": BEGAN_AT, "event": "attempt", "attempt": 0, "workers": [["a", 0, 0, 0]]},
    ]
    events += [
        {"at": BEGAN_AT + at, "event": "metrics", "attempt": 0, "ranks": {}, "hosts": {}, "lines": {"0": 30}}
        for at in range(0, 20, 2)
    ]
    (tmp_path / "mine.jsonl").write_bytes(as_lines(events))
    run = run_of(tmp_path / "mine.jsonl")
    assert run.label == "mine"
    assert not run.state.has_numbers
    assert run.curves.over_time["lines_per_s"].points()[-1].mean == 15.0
    assert run.state.num_lines == 300
    assert run.state.last_step is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no event of a job is in it"),
        ("hello\n", "no event of a job is in it"),
        ('{"attempts": 3}', "cannot be read as the report of a job"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / ("x.json" if text.startswith("{") else "x")
    path.write_text(text)
    with pytest.raises(LaunchError, match=why):
        run_of(path)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"there is no events\.jsonl and no report\.json"):
        find_source(str(tmp_path))
    assert find_source(str(tmp_path / "missing")) is None


def test_seconds_by_phase_are_those_of_a_step() -> None:
    shares = Shares(max_points=10)
    for second in range(1000):
        shares.add(float(second), 0, {"steps": 2.0, "forward_s": 0.5, "comm_s": 0.1})
    shares.add(1000.0, 0, {"steps": 0.0, "forward_s": 1.0})
    points = list(shares.points())
    assert len(points) <= 10
    assert points[0][2] == pytest.approx({"forward_s": 0.25, "comm_s": 0.05})
