"""How a job on this machine ends: exit codes, who failed first, the report as a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.launcher.local_job import Start, assert_short

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("worker", "code"),
    [
        ("", 0),
        ("sys.exit(255)", 255),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143),
    ],
)
def test_the_exit_code_is_that_of_the_worker(worker: str, code: int, start: Start) -> None:
    job = start(worker)
    assert job.wait() == code
    job.assert_nothing_is_left()


def test_the_first_failure_stops_all_and_is_named_with_its_last_lines(start: Start) -> None:
    job = start(
        """
        if rank == 1:
            for number in range(30): say('line', number)
            raise ValueError('the reason')
        wait()
        """,
        "--num_gpus=4",
    )
    assert job.wait() == 1
    pid = re.search(r"pid (\d+)", job.err)
    assert pid is not None
    who = f"rank 1 on localhost (local rank 1, pid {pid[1]}) exited with code 1"
    lines = job.err.splitlines()
    lines = lines[lines.index(f"dslaunch: {who}; it failed first") :]
    assert lines[1:] == ["dslaunch: its traceback stands above: ValueError: the reason"]
    assert job.err.count("localhost:1 | Traceback (most recent call last):") == 1
    assert job.err.count(who) == 1
    assert "rank 1 on localhost failed: stopping 3 other workers (SIGTERM, and SIGKILL after 30 s)" in job.err
    assert "also failed" not in job.err
    job.assert_nothing_is_left()


def test_a_good_end_says_nothing_with_quiet(start: Start) -> None:
    job = start("say('hello')", "--quiet", "--num_gpus=2")
    assert job.wait() == 0
    assert sorted(job.out.splitlines()) == ["localhost:0 | hello", "localhost:1 | hello"]
    assert job.err == ""


def test_the_timings_are_said_in_the_order_of_time(start: Start, tmp_path: Path) -> None:
    job = start("say('hello')", "--timings", "--events", "events")
    assert job.wait() == 0
    (line,) = [line for line in job.err.splitlines() if "timings" in line]
    found = re.findall(r"([a-z ]+) ([0-9.]+) s", line.partition("timings: ")[2].replace(",", ""))
    assert [name.strip() for name, _ in found] == [
        "connected",
        "agent",
        "prepared",
        "started",
        "first output",
        "ended",
    ]
    assert [float(seconds) for _, seconds in found] == sorted(float(seconds) for _, seconds in found)
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    phases = [event for event in events if event["event"] == "phase"]
    assert [event["phase"] for event in phases] == ["connected", "agent", "prepared", "started", "ended"]
    assert [event["at"] for event in phases] == sorted(event["at"] for event in phases)


def test_the_report_is_a_file(start: Start, tmp_path: Path) -> None:
    job = start("sys.exit(7 * rank)", "--num_gpus=2", "--report=end.json")
    assert job.wait() == 7
    report = json.loads((tmp_path / "end.json").read_text())
    assert report["exit_code"] == 7
    assert report["culprit"]["rank"] == 1
    assert list(report["phases_s"]) == ["connected", "agent", "prepared", "started"]


def test_a_report_that_cannot_be_written_is_one_line(start: Start) -> None:
    job = start("", "--report=no/such/folder")
    assert job.wait() == 2
    assert job.err.splitlines()[-1].startswith(
        "dslaunch: --report=no/such/folder: there is no folder no/such"
    )
    assert_short(job)


def test_a_host_that_is_lost_with_its_files_is_named(start: Start, tmp_path: Path) -> None:
    job = start(
        "open('out.txt', 'w').close(); os.kill(os.getppid(), signal.SIGKILL); wait()",
        "--collect=*.txt",
        f"--collect_to={tmp_path / 'back'}",
    )
    assert job.wait() == 3
    said = "--collect: not brought: localhost: what its workers wrote, for it was lost before they had ended"
    assert said in job.err
    assert "collected 0 files" in job.err
    job.assert_nothing_is_left()
