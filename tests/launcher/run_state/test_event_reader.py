"""Events from files that are written, replaced, cut and damaged meanwhile."""

from __future__ import annotations

import json
import os
from pathlib import Path

from dslaunch.launcher.output.event_files import EventRing
from dslaunch.launcher.run_state.event_reader import EventReader


def line(number: int) -> bytes:
    return json.dumps({"event": "note", "at": number}).encode() + b"\n"


def read(reader: EventReader) -> list[int]:
    return [one["at"] for one in reader.events()]


def test_what_is_added_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "events"
    reader = EventReader(path)
    assert read(reader) == []
    path.write_bytes(line(1) + line(2)[:5])
    assert read(reader) == [1]
    with path.open("ab") as file:
        file.write(line(2)[5:] + line(3))
    assert read(reader) == [2, 3]
    assert read(reader) == []


def test_a_caller_that_ends_early_gets_the_others_later(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(b"".join(map(line, range(10))))
    reader = EventReader(path)
    assert next(reader.events())["at"] == 0
    assert read(reader) == list(range(1, 10))


def test_the_next_files_follow_the_old_one(tmp_path: Path) -> None:
    """As the launcher replaces them, with a reader that is there from the beginning, and a late one."""
    path = tmp_path / "events"
    ring = EventRing(path, max_bytes=200, opening=list, on_problem=print)
    early, seen = EventReader(path), []
    for number in range(50):
        ring.write(line(number))
        seen += read(early)
    assert seen == list(range(50))
    late = read(EventReader(path))
    assert late == list(range(late[0], 50))
    assert 5 < len(late) < 15
    ring.close()


def test_lines_that_are_no_events_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(
        b"\0\0\n[1]\n{}\n" + b"[" * 100_000 + b"\n" + line(4) + b'{"event": 3}\n\xff\n' + line(5)
    )
    reader = EventReader(path)
    assert read(reader) == [4, 5]
    assert reader.num_bad == 6


def test_a_job_whose_folder_is_removed_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(line(1))
    reader = EventReader(path)
    assert read(reader) == [1]
    with path.open("ab") as file:
        file.write(line(2))
    path.unlink()
    assert read(reader) == [2]
    reader.close()


def test_what_is_no_file_has_no_events(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "endless").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "endless", "pipe"):
        reader = EventReader(tmp_path / name)
        assert list(reader.events()) == []
        reader.close()
