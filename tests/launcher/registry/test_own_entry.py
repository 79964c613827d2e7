"""The folder of a job: its name is its own, however many are made at one time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.options import Options
from dslaunch.launcher.options.detach import DetachOptions
from dslaunch.launcher.registry import own_entry
from dslaunch.launcher.registry.own_entry import OwnEntry, make_folder
from dslaunch.launcher.registry.record import JobState, read_record
from tests.launcher.local_job import poll

MAKE = """
from dslaunch.launcher.options import Options
from dslaunch.launcher.registry.own_entry import make_folder
input()
for _ in range(25): print(make_folder(Options(program="train.py")).name)
"""


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_jobs_without_a_name_get_names_of_their_own_also_at_one_time() -> None:
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for one in makers:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    names = [line.rpartition(".")[0] for one in makers for line in one.communicate()[0].split()]
    assert Counter(names) == Counter(["train", *(f"train-{number}" for number in range(2, 101))])


def test_a_name_that_was_given_may_come_again() -> None:
    options = Options(program="train.py", detach=DetachOptions(name="mine"))
    first, second = make_folder(options), make_folder(options)
    assert first != second
    assert {one.name.rpartition(".")[0] for one in (first, second)} == {"mine"}


def test_a_record_that_cannot_be_written_is_told_and_nothing_raises() -> None:
    folder = make_folder(Options(program="train.py"))
    entry = OwnEntry(folder, Options(program="train.py"), is_detached=True)
    entry.change(state=JobState.RUNNING)
    found = read_record(folder)
    assert found is not None
    assert found.state is JobState.RUNNING
    entry.remove()
    entry.change(exit_code=1)
    assert "the record of the job is out of date: No such file or directory" in entry.problem


def test_a_job_gives_signs_of_life_to_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_entry, "_SIGN_EVERY_S", 0.005)
    folder = make_folder(Options(program="train.py"))
    entry = OwnEntry(folder, Options(program="train.py"), is_detached=True)
    os.utime(folder / "lock", (1, 1))
    poll(lambda: (folder / "lock").stat().st_mtime > 1, "a sign of life")
    entry.remove()


def test_two_processes_cannot_be_one_job() -> None:
    folder = make_folder(Options(program="train.py"))
    program = f"""
from pathlib import Path
from dslaunch.launcher.options import Options
from dslaunch.launcher.registry.own_entry import OwnEntry
entry = OwnEntry(Path({str(folder)!r}), Options(program="train.py"), is_detached=True)
print("held", flush=True)
input()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(LaunchError, match="the record of the job cannot be kept there"):
        OwnEntry(folder, Options(program="train.py"), is_detached=True)
    other.communicate("")
