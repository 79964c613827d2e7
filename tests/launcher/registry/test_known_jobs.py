"""What has become of jobs, which one a name means, and which records are kept."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from dslaunch.launcher.command_line import attach
from dslaunch.launcher.command_line.job_choice import how_it_ended
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.registry import known_jobs as registry
from dslaunch.launcher.registry.following import now_of
from dslaunch.launcher.registry.known_jobs import AmbiguousError, clean, find_job, known_jobs, look_at
from dslaunch.launcher.registry.record import JobState
from tests.launcher.registry.records import make_record
from tests.launcher.registry.test_holder import start_holder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "dslaunch" / "jobs"
    path.mkdir(parents=True)
    for one in (path, path.parent):
        one.chmod(0o700)
    return path


@pytest.mark.parametrize(
    ("fields", "state", "why"),
    [
        ({"state": JobState.ENDED}, "ended", ""),
        ({"state": JobState.RUNNING, "pid": 4711}, "lost", "its dslaunch (pid 4711) was killed"),
        ({"state": JobState.RUNNING, "boot_id": "before"}, "lost", "was started anew"),
        ({"state": JobState.RUNNING, "boot_id": "b", "host": "other"}, "elsewhere", "on other: ask there"),
        ({"state": JobState.ENDED, "boot_id": "b", "host": "other"}, "ended", ""),
    ],
)
def test_what_has_become_of_a_job(folder: Path, fields: dict[str, object], state: str, why: str) -> None:
    job = look_at(make_record(folder, **fields))
    assert job is not None
    assert job.state == state
    assert why in job.why
    assert job.is_live == (state == "elsewhere")


def test_a_job_whose_process_holds_its_lock_is_there(folder: Path) -> None:
    path = make_record(folder, state=JobState.RUNNING)
    holder = start_holder(path)
    job = look_at(path)
    assert job is not None
    assert (job.state, job.is_live) == ("running", True)
    holder.kill()
    holder.communicate()
    job = look_at(path)
    assert job is not None
    assert job.state == "lost"


def test_the_job_that_is_meant(folder: Path) -> None:
    make_record(folder, "a", "0001", began_at=1.0)
    make_record(folder, "a", "0002", began_at=2.0)
    make_record(folder, "train", "0001", began_at=3.0)
    assert find_job("train").record.id == "train.0001"
    assert find_job("a.0002").record.id == "a.0002"
    with pytest.raises(AmbiguousError, match=r"2 jobs are called a: write the exact name of one") as caught:
        find_job("a")
    assert [one.record.id for one in caught.value.jobs] == ["a.0001", "a.0002"]
    holder = start_holder(make_record(folder, "a", "0003", state=JobState.RUNNING))
    assert find_job("a").record.id == "a.0003"  # the one that is there
    holder.kill()
    holder.communicate()
    with pytest.raises(LaunchError, match=r"no job 'trian' is known here; did you mean train\?"):
        find_job("trian")


def test_a_process_id_means_a_job_that_is_there(folder: Path) -> None:
    path = make_record(folder, state=JobState.RUNNING, pid=4711)
    with pytest.raises(LaunchError, match="no job '4711' is known"):
        find_job("4711")
    holder = start_holder(path)
    assert find_job("4711").record.name == "train"
    holder.kill()
    holder.communicate()


def test_old_records_are_removed_and_jobs_that_are_there_are_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_KEPT", 3)
    now = time.time()
    old = now - registry.KEPT_S - 60
    make_record(folder, "old", ended_at=old, began_at=old)
    make_record(folder, "lost", state=JobState.RUNNING, began_at=old)
    make_record(folder, "away", state=JobState.RUNNING, began_at=old, host="other", boot_id="b")
    running = make_record(folder, "running", state=JobState.RUNNING, began_at=old)
    for number in range(5):
        make_record(folder, "new", f"{number:04}", ended_at=now - number)
    half_made = folder / "half.0001"
    half_made.mkdir()
    os.utime(half_made, (old, old))
    (folder / "young.0001").mkdir()
    holder = start_holder(running)
    clean()
    kept = ["away.0001", "new.0000", "new.0001", "new.0002", "running.0001", "young.0001"]
    assert sorted(one.name for one in folder.iterdir()) == kept
    holder.kill()
    holder.communicate()


def test_a_record_of_another_machine_goes_when_that_gives_no_sign_of_life(folder: Path) -> None:
    """Counted by the clock of the file system: this machine's may be wrong."""
    old = time.time() - registry.KEPT_S - 60
    fields = {"state": JobState.RUNNING, "began_at": old, "host": "other", "boot_id": "b"}
    for name in ("gone", "silent", "writes"):
        path = make_record(folder, name, **fields)
        (path / "lock").touch()
        (path / "journal").touch()
        for one in path.iterdir():
            os.utime(one, (old, old))
    os.utime(folder / "silent.0001" / "lock")  # as its process does
    os.utime(folder / "writes.0001" / "journal")
    clean()
    assert sorted(one.name for one in folder.iterdir()) == ["silent.0001", "writes.0001"]


def test_without_any_record_there_are_no_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "none"))
    assert known_jobs() == []
    clean()
    assert not (tmp_path / "none").exists()


def test_a_job_whose_record_was_removed_has_no_exit_code_that_is_told(folder: Path) -> None:
    """Of one that failed before its workers ran nothing is left, and it did not end with 0."""
    path = make_record(folder, state=JobState.STARTING, exit_code=0)
    holder = start_holder(path)
    job = look_at(path)
    assert job is not None
    holder.kill()
    holder.communicate()
    shutil.rmtree(path)
    gone = now_of(job)
    assert not gone.is_live
    assert how_it_ended(gone) == "train: it has ended, and left no record; what started it was told how"
    with pytest.raises(LaunchError, match="left no record") as raised:
        attach._end(gone)
    assert raised.value.exit_code == 1
