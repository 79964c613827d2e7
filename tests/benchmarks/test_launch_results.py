"""What the launch benchmark makes of its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.launch_clock import CommandFailed, Time, take_turns
from benchmarks.launch_measures import curve_targets
from benchmarks.launch_results import COMMAND, Results, Target, markdown, publish

BEGIN, END = (f"<!-- made by `{COMMAND}`: {word} -->" for word in ("begin", "end"))
RESULTS = Results(
    counts=(1, 16),
    curve={"dslaunch": (0.2, 0.9), "pdsh": (0.15, 1.8), "mpirun": (0.3, None)},
    targets=(
        Target(measure="fast", ours=2.0, peer="pdsh", theirs=4.0, unit="s", max_ratio=0.6),
        Target(
            measure="slow", ours=150.0, peer="pdsh", theirs=2000.0, unit="ms", max_ratio=0.1, max_ours=100
        ),
        Target(measure="alone", ours=1.0, peer="torchrun", theirs=None, unit="s", max_ratio=1.0),
    ),
    num_runs=3,
    missing=("mpirun: 15 of 16 workers ran",),
    phases={1: {"connected": 0.1, "started": 0.2}, 16: {"connected": 0.4, "started": 0.9}},
)


def test_the_table_shows_every_measure_and_says_which_goal_is_missed() -> None:
    lines = markdown(RESULTS).splitlines()
    assert "| hosts | dslaunch | pdsh | mpirun |" in lines
    assert "| 16 | 0.90 | 1.80 |  |" in lines
    assert "| fast | 2 s | pdsh 4 s | 0.50 | ratio <= 0.6 |" in lines
    assert "| slow | 150 ms | pdsh 2000 ms | 0.075 | ratio <= 0.1, <= 100 ms (missed) |" in lines
    assert "| alone | 1 s | torchrun not measured |  | ratio <= 1 |" in lines
    assert lines[-1] == "Left out: mpirun: 15 of 16 workers ran."


@pytest.mark.slow
def test_publishing_replaces_what_was_published_before_and_nothing_else(tmp_path: Path) -> None:
    guide = tmp_path / "benchmarks.md"
    guide.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    publish(RESULTS, guide)
    once = guide.read_text()
    publish(RESULTS, guide)
    assert guide.read_text() == once
    assert once.startswith(f"before\n{BEGIN}\n")
    assert once.endswith(f"{END}\nafter\n")
    assert "old" not in once
    assert markdown(RESULTS) in once
    for picture in ("launch.png", "launch-phases.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_a_guide_without_a_place_for_the_tables_is_left_as_it_is(tmp_path: Path) -> None:
    guide = tmp_path / "benchmarks.md"
    guide.write_text("nothing\n")
    with pytest.raises(ValueError, match="put them where the tables belong"):
        publish(RESULTS, guide)
    assert guide.read_text() == "nothing\n"


def test_the_curve_gives_the_goals_of_the_numbers_of_hosts_that_were_measured() -> None:
    row = {"dslaunch": Time(1.0, 0.64), "pdsh": Time(2.0, 1.28)}
    targets = curve_targets({4: row, 16: row, 64: row})
    assert [(one.measure, one.peer, one.ratio, one.max_ratio) for one in targets] == [
        ("all workers started on 16 hosts", "deepspeed + pdsh", None, 0.1),
        ("all workers started on 16 hosts", "pdsh", 0.5, 0.6),
        ("all workers started on 64 hosts", "pdsh", 0.5, 0.4),
        ("all workers started on 64 hosts", "paramiko: true", None, 1.25),
        ("launcher CPU per host, 64 hosts", "pdsh", 0.5, None),
    ]
    assert (targets[-1].ours, targets[-1].theirs, targets[-1].max_ours) == (10.0, 20.0, 15)
    assert [one.max_ours for one in curve_targets({4: row})] == [None], "the goal is for 64 hosts"


def test_tools_take_turns_and_warm_ups_do_not_count() -> None:
    order: list[str] = []
    given = {"ours": [9.0, 1.0, 3.0, 2.0], "theirs": [9.0, 5.0, 4.0, 6.0]}

    def measure(name: str) -> Time:
        order.append(name)
        return Time(given[name].pop(0), 0.0)

    tools = {name: lambda name=name: measure(name) for name in given}
    medians = take_turns(tools, num_runs=3, num_warm_ups=1, leave_out=pytest.fail)
    assert order == ["ours", "theirs"] * 4
    assert {name: took.wall_s for name, took in medians.items()} == {"ours": 2.0, "theirs": 5.0}


def test_a_peer_that_fails_is_left_out_and_ours_is_not() -> None:
    def fail() -> Time:
        raise CommandFailed("1 of 2 workers ran")

    said: list[str] = []
    tools = {"ours": lambda: Time(1.0, 0.0), "theirs": fail}
    assert [*take_turns(tools, num_runs=2, num_warm_ups=0, leave_out=said.append)] == ["ours"]
    assert said == ["theirs: 1 of 2 workers ran"]
    with pytest.raises(CommandFailed):
        take_turns({"ours": fail}, num_runs=1, num_warm_ups=0, leave_out=said.append)
