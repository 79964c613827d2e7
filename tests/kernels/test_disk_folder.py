"""A rank's folder: it goes with its process, or the next run removes it; no other folder is touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dslaunch.kernels import disk_folder
from dslaunch.kernels.disk_folder import DiskFolder, clean_stale

TIME_LIMIT_S = 60

CLAIM = """
import sys
from dslaunch.kernels.disk_folder import DiskFolder
folder = DiskFolder.claim(sys.argv[1], sys.argv[2], int(sys.argv[3]))
(folder.path / "states").write_bytes(b"x" * 10000)
print("claimed", flush=True)
sys.stdin.readline()
"""

Claimed = Callable[[str, int], "subprocess.Popen[str]"]


@pytest.fixture
def claimed(tmp_path: Path) -> Iterator[Claimed]:
    """Starts a process that claims a folder, with a file in it, and lives until a line is sent to it."""
    processes = []

    def start(job_id: str, rank: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", CLAIM, str(tmp_path), job_id, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_folder_is_empty_private_and_goes_when_it_is_closed(tmp_path: Path) -> None:
    folder = DiskFolder.claim(tmp_path, "job-1", 3)
    assert folder.path == tmp_path / "dslaunch-job-1" / "rank3"
    assert os.listdir(folder.path) == []
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "deep").mkdir()
    (folder.path / "deep" / "file").write_bytes(b"x")
    folder.close()
    folder.close()
    assert tree(tmp_path) == []


@pytest.mark.slow
def test_a_program_that_ends_leaves_nothing(tmp_path: Path, claimed: Claimed) -> None:
    process = claimed("job", 0)
    assert tree(tmp_path) == [
        "dslaunch-job",
        "dslaunch-job/rank0",
        "dslaunch-job/rank0.lock",
        "dslaunch-job/rank0/states",
    ]
    process.communicate("end\n")
    assert process.returncode == 0
    assert tree(tmp_path) == []


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_and_living_ones_stay(tmp_path: Path, claimed: Claimed) -> None:
    claimed("living", 0)
    dead = [claimed("living", 1), claimed("dead", 0)]
    (tmp_path / "mine").mkdir()
    (tmp_path / "dslaunch-notes.txt").write_text("mine")
    (tmp_path / "dslaunch-dead" / "by-hand").mkdir()
    before = tree(tmp_path)
    assert clean_stale(tmp_path) == ()
    assert tree(tmp_path) == before
    for process in dead:
        process.send_signal(signal.SIGKILL)
        process.wait(TIME_LIMIT_S)
    assert clean_stale(tmp_path) == (
        tmp_path / "dslaunch-dead" / "rank0",
        tmp_path / "dslaunch-living" / "rank1",
    )
    assert tree(tmp_path) == [
        "dslaunch-dead",
        "dslaunch-dead/by-hand",
        "dslaunch-living",
        "dslaunch-living/rank0",
        "dslaunch-living/rank0.lock",
        "dslaunch-living/rank0/states",
        "dslaunch-notes.txt",
        "mine",
    ]


@pytest.mark.slow
def test_the_next_claim_cleans_up_and_may_take_the_same_name(tmp_path: Path, claimed: Claimed) -> None:
    for process in (claimed("job", 0), claimed("other", 0)):
        process.kill()
        process.wait(TIME_LIMIT_S)
    folder = DiskFolder.claim(tmp_path, "job", 0)
    assert tree(tmp_path) == ["dslaunch-job", "dslaunch-job/rank0", "dslaunch-job/rank0.lock"]
    folder.close()


@pytest.mark.slow
def test_a_name_in_use_is_refused_with_its_process(
    tmp_path: Path, claimed: Claimed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_folder, "CLEANING_TIME_S", 0.2)
    process = claimed("job", 0)
    with pytest.raises(
        FileExistsError, match=rf"in use by process {process.pid} on host .*; use another job id"
    ):
        DiskFolder.claim(tmp_path, "job", 0)
    DiskFolder.claim(tmp_path, "job", 1).close()
    assert (tmp_path / "dslaunch-job" / "rank0" / "states").stat().st_size == 10_000


@pytest.mark.slow
def test_the_parents_folder_survives_a_forked_child_that_ends(tmp_path: Path) -> None:
    script = """
import os, sys
from dslaunch.kernels.disk_folder import DiskFolder
folder = DiskFolder.claim(sys.argv[1], "job", 0)
child = os.fork()
if child == 0:
    folder.close()
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert folder.path.is_dir()
"""
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True, timeout=TIME_LIMIT_S)
    assert tree(tmp_path) == []


@pytest.mark.slow
def test_many_claims_at_once_each_get_a_folder_of_their_own(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            for turn in range(40):
                folder = DiskFolder.claim(tmp_path, "job", rank)
                (folder.path / "file").write_text(f"{rank} {turn}")
                clean_stale(tmp_path)
                assert (folder.path / "file").read_text() == f"{rank} {turn}"
                folder.close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIME_LIMIT_S)
    assert not failed
    assert tree(tmp_path) == []


# ---- file systems that hosts share -----------------------------------------------------------------------


def leave(base: Path, *, boot_id: str | None) -> Path:
    """What a dead rank 0 of job 'old' leaves."""
    path = base / "dslaunch-old" / "rank0"
    path.mkdir(parents=True)
    owner = {"host": "node7", "boot_id": boot_id, "pid": 4321}
    path.with_name("rank0.lock").write_text("" if boot_id is None else json.dumps(owner))
    return path


@pytest.mark.parametrize(
    ("boot_id", "is_local", "goes"),
    [
        ("of this host", True, True),
        ("of this host", False, True),
        ("of another", True, True),  # this host, before it was started again
        ("of another", False, False),
        (None, True, True),
        (None, False, False),
        ("", False, False),
    ],
)
def test_a_free_lock_is_enough_on_a_local_disk_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boot_id: str | None, is_local: bool, goes: bool
) -> None:
    monkeypatch.setattr(disk_folder, "_is_local", lambda path: is_local)
    left = leave(tmp_path, boot_id=disk_folder._boot_id() if boot_id == "of this host" else boot_id)
    assert clean_stale(tmp_path) == ((left,) if goes else ())
    assert left.exists() == (not goes)
    assert (tmp_path / "dslaunch-old").exists() == (not goes)


def test_a_name_that_another_host_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_folder, "_is_local", lambda path: False)
    leave(tmp_path, boot_id="of another")
    with pytest.raises(FileExistsError, match="in use by process 4321 on host node7, perhaps still alive"):
        DiskFolder.claim(tmp_path, "old", 0)


# ---- other users, and mistakes ---------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_folders_of_other_users_stay(tmp_path: Path) -> None:
    left = leave(tmp_path, boot_id=disk_folder._boot_id())
    os.chown(left.parent, 12345, 12345)
    assert clean_stale(tmp_path) == ()
    with pytest.raises(PermissionError, match="not a folder of this user; use another job id"):
        DiskFolder.claim(tmp_path, "old", 0)
    os.chown(left.parent, 0, 0)
    os.chown(left.with_name("rank0.lock"), 12345, 12345)
    assert clean_stale(tmp_path) == ()
    assert left.exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    base, outside = tmp_path / "base", tmp_path / "outside"
    base.mkdir()
    left = leave(outside, boot_id=disk_folder._boot_id())
    (base / "dslaunch-old").symlink_to(outside / "dslaunch-old")
    assert clean_stale(base) == ()
    assert left.exists()
    with pytest.raises(PermissionError, match="not a folder of this user"):
        DiskFolder.claim(base, "old", 0)


@pytest.mark.parametrize(
    ("job_id", "rank", "message"),
    [
        ("", 0, "job_id: ''; must be 1 to 200 of the letters A-Z a-z 0-9 . _ -"),
        ("a/b", 0, "job_id: 'a/b'; must be 1 to 200 of the letters A-Z a-z 0-9 . _ -"),
        ("job", -1, "rank: -1; must be >= 0"),
    ],
)
def test_names_that_cannot_be_are_refused(tmp_path: Path, job_id: str, rank: int, message: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        DiskFolder.claim(tmp_path, job_id, rank)
    assert str(caught.value) == message
    assert tree(tmp_path) == []


def test_a_path_that_is_no_folder_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, error, words in (
        ("none", FileNotFoundError, "nvme_path: no such folder; make it first"),
        ("file", NotADirectoryError, "nvme_path: not a folder; name one on a local disk"),
    ):
        for call in (clean_stale, lambda path: DiskFolder.claim(path, "job", 0)):
            with pytest.raises(error) as caught:
                call(tmp_path / name)
            assert caught.value.strerror == words
            assert caught.value.filename == str(tmp_path / name)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_that_may_not_be_written_is_said_in_one_line() -> None:
    script = """
import os
from dslaunch.kernels.disk_folder import DiskFolder
os.setuid(65534)
try:
    DiskFolder.claim("/proc/1", "job", 0)
except PermissionError as error:
    assert error.strerror == "nvme_path: this user may not write there; name another folder", error.strerror
else:
    raise SystemExit("not refused")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=TIME_LIMIT_S)
