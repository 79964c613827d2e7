"""The record of a job is read whole, whatever ended the process that wrote it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.launcher.registry import record
from dslaunch.launcher.registry.record import JobState, name_from, read_record, write_record
from tests.launcher.registry.records import make_record
from tests.small_disk import small_disk_at


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    fields = {"hosts": ("a", "b"), "shown": ((0, 3),), "state": JobState.RUNNING, "command": ("x", "\udcff")}
    folder = make_record(tmp_path, **fields)
    found = read_record(folder)
    assert found is not None
    assert {name: getattr(found, name) for name in fields} == fields
    assert found.id == "train.0001"


@pytest.mark.parametrize(
    ("program", "is_module", "name"),
    [
        ("train.py", False, "train"),
        ("src/run it.sh", False, "run-it"),
        ("pkg.train", True, "pkg.train"),
        ("7.py", False, "job-7"),
        ("/opt/\u00fcber/--", False, "job"),
        ("x" * 90, False, "x" * 55),
    ],
)
def test_what_a_job_is_called_that_was_given_no_name(program: str, is_module: bool, name: str) -> None:
    assert name_from(program, is_module=is_module) == name


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 99}', "\0" * 100])
def test_what_is_no_record_is_not_read(tmp_path: Path, text: str) -> None:
    (tmp_path / record.FILE).write_text(text)
    assert read_record(tmp_path) is None


@pytest.mark.parametrize(
    "field",
    [
        {"began_at": "x"},
        {"ended_at": None},
        {"exit_code": [3]},
        {"name": 5},
        {"began_at": float("nan")},
        {"hosts": 5},
    ],
)
def test_a_record_with_a_value_of_another_kind_is_none(tmp_path: Path, field: dict[str, object]) -> None:
    """One such record, of a disk that was damaged, must not end `dslaunch jobs` for all jobs."""
    path = make_record(tmp_path) / record.FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **field}))
    assert read_record(path.parent) is None


WRITE_FOR_EVER = """
import sys
from pathlib import Path
from dslaunch.launcher.registry.record import read_record, write_record
folder = Path(sys.argv[1])
one = read_record(folder)
number = 0
while True:
    number += 1
    write_record(folder, one._replace(attempt=number, verdict="x" * (number % 5000)))
    if number == 3: print("going", flush=True)
"""


def test_a_writer_killed_in_the_middle_leaves_a_record_that_can_be_read(tmp_path: Path) -> None:
    folder = make_record(tmp_path)
    for _ in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, str(folder)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(200):
            seen = read_record(folder)
            assert seen is not None
            assert len(seen.verdict) == seen.attempt % 5000
        writer.kill()
        writer.wait()
        writer.stdout.close()
        seen = read_record(folder)
        assert seen is not None
        assert len(seen.verdict) == seen.attempt % 5000


def test_a_half_written_new_record_is_passed_over(tmp_path: Path) -> None:
    folder = make_record(tmp_path)
    (folder / record.NEW_FILE).write_text('{"format": 1, "na')
    found = read_record(folder)
    assert found is not None
    assert found.name == "train"
    write_record(folder, found._replace(exit_code=9))
    after = read_record(folder)
    assert after is not None
    assert after.exit_code == 9


def test_on_a_full_disk_the_reserve_is_given_up_for_the_last_words(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", "size=64k") as disk:
        folder = make_record(disk)
        with pytest.raises(OSError, match="No space"):
            (disk / "filler").write_bytes(b"x" * (1 << 20))
        found = read_record(folder)
        assert found is not None
        write_record(folder, found._replace(exit_code=7))
        after = read_record(folder)
        assert after is not None
        assert after.exit_code == 7
