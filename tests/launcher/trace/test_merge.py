"""One file of many ranks' traces: what is in it, and what Perfetto asks of it."""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.trace import merge
from dslaunch.launcher.trace.merge import read_head, write_merged
from dslaunch.launcher.trace.rank_trace import RankTrace, read_rank
from dslaunch.launcher.trace.shown import lines_of_file
from dslaunch.launcher.trace.times import times_of
from tests.launcher.trace.made_up import clock, span, torch_event, write_rank

Event = dict[str, Any]


def load(path: Path) -> list[Event]:
    """All events, once what the format asks for has been checked."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[Event] = json.loads(text)["traceEvents"]
    check_events(events)
    return events


def check_events(events: list[Event]) -> None:
    """Each has what its kind needs, slices of a row are nested, and arrows have both ends."""
    rows: dict[tuple[int, int], list[Event]] = defaultdict(list)
    ends: dict[tuple[str, int], list[str]] = defaultdict(list)
    for event in events:
        assert {"ph", "ts", "pid", "tid", "name"} <= event.keys(), event
        assert event["ph"] in "XMstf", event
        assert (type(event["pid"]), type(event["tid"])) == (int, int), event
        assert event["ts"] >= 0, event
        assert event["name"], event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            rows[event["pid"], event["tid"]].append(event)
        elif event["ph"] in "stf":
            ends[event["cat"], event["id"]].append(event["ph"])
    for slices in rows.values():
        slices.sort(key=lambda one: (one["ts"], -one["dur"]))
        under_way: list[float] = []
        for one in slices:
            ended = one["ts"] + one["dur"]
            while under_way and under_way[-1] <= one["ts"] + 0.0015:  # rounded to ns
                under_way.pop()
            assert not under_way or ended <= under_way[-1] + 0.0015, (one, under_way)
            under_way.append(ended)
    for key, found in ends.items():
        assert (found.count("s"), found.count("f")) == (1, 1), (key, found)


def trace_of(folder: Path, rank: int, *, host: str = "a", offset_s: float = 0.0) -> RankTrace:
    return read_rank(folder, rank=rank, host=host, clock=clock(offset_s), wanted=(1, 1))


def test_ranks_are_processes_in_order_and_hosts_have_one_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of b is 5000 s behind."""
    told: list[int] = []
    monkeypatch.setattr(merge, "_TOLD_EACH", 10)
    about = {"op": "all_gather", "what": "unit 'x'", "key": "1/7//0", "optimizer step": 1}
    for rank, began, ended in ((9, 10, 30), (10, 5020, 5030)):
        at = 5000 * (rank == 10)
        spans = [
            span("communication", "all_gather of unit 'x'", began, ended, **about),
            span("communication", "reduce_scatter of unit 'x'", began + 5, ended + 20),
            span("wait", "wait for all_gather of unit 'x'", ended - 5, ended),
            span("update", "update of unit 'x'", began, ended, thread=5),
        ]
        operators = [
            torch_event("cpu_op", "aten::mm", began, ended),
            torch_event("user_annotation", "gloo:recv", began + 1, ended + 1),
            torch_event("user_annotation", "gloo:recv", began + 2, ended + 2),
            torch_event("cpu_op", "aten::add", began + 3, began + 4),
            torch_event("cpu_op", "aten::relu", ended + 3, ended + 4),
        ]
        write_rank(tmp_path, rank, [(1, at, at + 100, spans)], torch=operators)
    path = tmp_path / "all.json.gz"
    traces = [trace_of(tmp_path, 10, host="b", offset_s=-5.0), trace_of(tmp_path, 9)]
    merged = write_merged(str(path), traces, {"some": "head"}, told=told.append)
    events = load(path)
    assert (merged.num_events, merged.notes) == (len(events), ())
    assert told == list(range(10, len(events) + 1, 10))
    assert told
    assert read_head(str(path)) == {"some": "head"}
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    order = {one["pid"]: one["args"]["sort_index"] for one in events if one["name"] == "process_sort_index"}
    assert names == {9: "a: rank 9", 10: "b: rank 10"}
    assert order == {9: 0, 10: 1}
    at = {(one["pid"], one["name"]): one["ts"] for one in events if one["ph"] == "X"}
    assert at[9, "all_gather of unit 'x'"] == 10_000  # us
    assert at[10, "all_gather of unit 'x'"] == 20_000
    assert at[10, "aten::mm"] == 20_000
    assert at[10, "step 1"] == 0
    arrows = [(one["ph"], one["pid"], one["ts"]) for one in events if one.get("cat") == "collective"]
    assert arrows == [("s", 9, 10_000), ("f", 10, 20_000)]
    row = {one["name"]: one["tid"] for one in events if one["ph"] == "X" and one["pid"] == 9}
    assert row["aten::mm"] == row["aten::add"] == row["aten::relu"]
    rows = {one["args"]["name"] for one in events if one["name"] == "thread_name" and one["pid"] == 9}
    ours = {"dslaunch", "communication", "communication 2", "dslaunch, thread 5"}
    assert rows == ours | {"program (torch)", "program (torch), beside 1", "program (torch), beside 2"}


def test_of_too_many_events_the_shortest_are_left_out_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "MAX_TORCH_EVENTS", 3)
    operators = [torch_event("cpu_op", f"op{n}", 10 * n, 10 * n + n) for n in range(1, 7)]
    write_rank(tmp_path, 0, [(1, 0, 100, [span("forward", "forward", 0, 1)])], torch=operators)
    merged = write_merged(str(tmp_path / "few.json"), [trace_of(tmp_path, 0)], {}, told=lambda _: None)
    names = {one["name"] for one in load(tmp_path / "few.json") if one["ph"] == "X"}
    assert names == {"step 1", "forward", "op4", "op5", "op6"}
    assert merged.notes == (
        (0, "3 of 6 events of torch's are not in the file, the shortest, none of more than 4000.0 us"),
    )


def test_a_killed_ranks_steps_are_there_and_what_is_missing_is_named(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 0, [(1, 0, 10, []), (2, 10, 20, [])], torch=None)
    path.write_bytes(path.read_bytes() + b'{"step":3,"began":20000')  # killed while it wrote
    trace = read_rank(
        tmp_path, rank=0, host="a", clock=clock(), wanted=(1, 4), how_it_ended="it was killed by SIGKILL"
    )
    assert [one.number for one in trace.steps] == [1, 2]
    assert trace.problems == (
        "without steps 3-4: it was killed by SIGKILL",
        "torch's operators are missing: the rank ended before it wrote them",
    )


def test_steps_of_any_range_are_named_where_they_are_missing(tmp_path: Path) -> None:
    """They are never counted out one by one."""
    write_rank(tmp_path, 0, [(2, 0, 10, []), (3, 10, 20, []), (5, 20, 30, [])], torch=None)
    trace = read_rank(tmp_path, rank=0, host="a", clock=clock(), wanted=(1, 10**12 - 1), how_it_ended="why")
    assert trace.problems[0] == "without steps 1,4,6-999999999999: why"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "its trace is cut off before its first line ends"),
        ("[]\n", "its trace is cut off before its first line ends"),
        ('{"thread": "x", "clock": [0, 0, 0]}\n', "its trace is cut off before its first line ends"),
        (
            '{"thread": 1, "clock": [0, 0, 0]}\n{"step": 1, "began": 0, "ended": 5, "spans": [["x"]]}\n',
            "a line of its trace cannot be read, and what follows it is left out "
            "(not enough values to unpack (expected at least 5, got 1))",
        ),
        (
            '{"thread": 1, "clock": [0, 0, 0]}\nwhat\n',
            "a line of its trace cannot be read, and what follows it is left out "
            "(Expecting value: line 1 column 1 (char 0))",
        ),
    ],
)
def test_what_is_no_trace_is_said_in_words(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "trace-0.spans").write_text(text)
    assert trace_of(tmp_path, 0).problems[0] == problem


def test_a_rank_that_wrote_nothing_is_told_what_a_trace_needs(tmp_path: Path) -> None:
    assert trace_of(tmp_path, 3).problems == (
        "it has written nothing; does its program train with dslaunch.initialize(), or call "
        "dslaunch.report(step=...)?",
    )


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(LaunchError, match="it is a named pipe, which may be waited for without end; give"):
        read_head(str(tmp_path / "pipe.json"))


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{}", b"\x1f\x8b"),
        *(
            b'{"dslaunch":%s,"displayTimeUnit":"ms","traceEvents":[\n' % head
            for head in (b"[]", b"[" * 100_000, b"5")
        ),
    ],
    ids=range(6),
)
def test_a_file_that_is_none_of_ours_is_refused_in_one_line(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(text)
    with pytest.raises(LaunchError, match=r"give a file that dslaunch --trace has written"):
        lines_of_file(str(path))


def test_a_file_whose_numbers_were_changed_is_refused_in_one_line(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, [(1, 0, 100, [span("forward", "forward", 0, 1)])], torch=[])
    times = times_of(trace_of(tmp_path, 0))
    assert times is not None
    path = tmp_path / "x.json"
    row = times.as_json() | {"steps": None}
    head = json.dumps({"version": 1, "ranks": [row], "problems": [], "clock_error_s": 0.0})
    path.write_text(f'{{"dslaunch":{head},"displayTimeUnit":"ms","traceEvents":[\n')
    with pytest.raises(LaunchError, match=r"give a file that dslaunch --trace has written"):
        lines_of_file(str(path))
