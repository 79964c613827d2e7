"""Files of events: whole lines, bounded, and honest about what a disk did not take."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.output.event_files import EventRing, keep_events, write_events
from dslaunch.launcher.telemetry.telemetry import Telemetry


def events_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_event_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("of another job\n" * 100)
    telemetry, problems = Telemetry(), list[str]()
    telemetry.begin({"name": "train"}, interval_s=1.0)
    write_events(telemetry, tmp_path / "events", on_problem=problems.append)
    telemetry.record("note", text="a\n\udcff\u2028")
    telemetry.record("end", exit_code=0)
    telemetry.close()
    job, note, end = events_of(tmp_path / "events")
    assert (job["event"], job["name"]) == ("job", "train")
    assert note["text"] == "a\n\udcff\u2028"
    assert end["exit_code"] == 0
    assert abs(end["at"] - os.stat(tmp_path / "events").st_mtime) < 60
    assert problems == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_file_of_another_user_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text("of another user\n")
    os.chown(path, 1234, -1)
    why = "--events=.*: it belongs to the user with number 1234; give another name"
    with pytest.raises(LaunchError, match=why):
        write_events(Telemetry(), path, on_problem=pytest.fail)
    assert path.read_text() == "of another user\n"


@pytest.mark.slow
def test_a_full_ring_keeps_the_latest_and_what_they_are_about(tmp_path: Path) -> None:
    telemetry = Telemetry()
    telemetry.begin({"name": "train"}, interval_s=1.0)
    ring = EventRing(
        tmp_path / "events", max_bytes=4000, opening=lambda: telemetry.opening, on_problem=pytest.fail
    )
    telemetry.add(ring)
    for number in range(500):
        telemetry.record("note", text="x" * 20, number=number)
        ring._writer.drain(10)
    telemetry.close()
    found = events_of(tmp_path / "events.old"), events_of(tmp_path / "events")
    assert all(one[0]["event"] == "job" for one in found)
    numbers = [one["number"] for events in found for one in events if one["event"] == "note"]
    assert numbers == list(range(numbers[0], 500))
    assert all(os.stat(path).st_size <= 4100 for path in tmp_path.iterdir())
    assert sorted(os.listdir(tmp_path)) == ["events", "events.old"]


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("", "is a folder; give the name of a file"),
        ("missing/events", "there is no folder"),
        ("link", "is a symbolic link; give the file itself"),
        ("socket", "is no regular file; give the name of a file"),
        ("pipe", "cannot be written: no process reads this pipe; start the one that does first"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, place: str, why: str) -> None:
    (tmp_path / "link").symlink_to("other")
    os.mkfifo(tmp_path / "pipe")
    os.mknod(tmp_path / "socket", stat.S_IFSOCK)
    with pytest.raises(LaunchError, match=why):
        write_events(Telemetry(), tmp_path / place, on_problem=pytest.fail)


def test_a_pipe_with_a_reader_gets_them(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    telemetry = Telemetry()
    write_events(telemetry, tmp_path / "pipe", on_problem=pytest.fail)
    telemetry.record("note", number=1)
    telemetry.close()
    with open(reader, "rb") as told:
        assert [json.loads(line)["event"] for line in told.read().splitlines()] == ["note"]


STDOUT = """
import sys
from pathlib import Path
from dslaunch.launcher.output.event_files import write_events
from dslaunch.launcher.telemetry.telemetry import Telemetry
print("before", flush=True)
telemetry = Telemetry()
write_events(telemetry, Path(sys.argv[1]), on_problem=print)
for number in range(3):
    print("a line of output", flush=True)
    telemetry.record("note", number=number)
    telemetry._sinks[-1]._writer.drain()
telemetry.close()
print("after", flush=True)
"""


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_a_file_that_output_goes_to_as_well_has_both(tmp_path: Path, name: str) -> None:
    """And what was there of the file before the program stays."""
    with open(tmp_path / "out", "w+b") as out:
        out.write(b"of another program\n")
        out.flush()
        subprocess.run([sys.executable, "-c", STDOUT, name], stdout=out, check=True, timeout=30)
    lines = (tmp_path / "out").read_text().splitlines()
    kinds = [json.loads(line)["event"] if line.startswith("{") else line for line in lines]
    assert kinds == ["of another program", "before", *["a line of output", "note"] * 3, "after"]


FULL = """
import resource, signal, sys
from pathlib import Path
from dslaunch.launcher.output.event_files import write_events
from dslaunch.launcher.telemetry.telemetry import Telemetry
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
telemetry = Telemetry()
write_events(telemetry, Path("events"), on_problem=print)
telemetry._sinks[-1]._writer.drain()
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 1 << 30))
for number in range(20):
    telemetry.record("note", number=number)
    telemetry._sinks[-1]._writer.drain()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
for kind in ("running", "end"):
    telemetry.record(kind)
    telemetry._sinks[-1]._writer.drain()
telemetry.close()
"""


def test_what_a_full_disk_did_not_take_is_counted(tmp_path: Path) -> None:
    """A limit of the size of files stands in for the end of the disk."""
    ran = subprocess.run(
        [sys.executable, "-c", FULL], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30
    )
    assert ran.stdout == "events: not all events are kept there: File too large\n"
    *notes, lost, running, end = events_of(tmp_path / "events")
    assert [one["number"] for one in notes] == list(range(len(notes)))
    assert 0 < len(notes) < 20
    assert lost == {"event": "lost", "events": 20 - len(notes)}
    assert (running["event"], end["event"]) == ("running", "end")


def test_only_this_user_reads_those_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    telemetry = Telemetry()
    keep_events(telemetry, tmp_path / "run", on_problem=pytest.fail)
    telemetry.close()
    assert os.stat(tmp_path / "run" / "events.jsonl").st_mode & 0o777 == 0o600
