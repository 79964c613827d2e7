from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from dslaunch.launcher.node.system.private_folder import PrivateFolder
from tests.launcher.local_job import Job


def test_only_its_user_can_enter_it_and_it_goes_with_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = PrivateFolder()
    path = folder.file("error.json")
    assert path is not None
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    Path(path).write_text("old")
    assert folder.file("error.json") == path
    assert not os.path.exists(path)
    Path(path).write_text("new")
    folder.clear()
    assert folder.file("error.json") == path
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    assert list(tmp_path.glob("*/*")) == []
    Path(path).write_text("newer")
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []
    folder.clear()
    assert folder.file("error.json") == path, "made again"
    folder.remove()


def test_where_none_can_be_made_there_are_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, mode: int) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    folder = PrivateFolder()
    assert folder.file("error.json") is None
    folder.remove()


def test_it_is_made_where_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setenv("TEMP", str(tmp_path))
    folder = PrivateFolder()
    assert [path.name.startswith("dslaunch-") for path in tmp_path.iterdir()] == [True]
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_workers_leave_in_it_does_not_say_what_else_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    precious = [tmp_path / "precious", tmp_path / "folder" / "precious"]
    (tmp_path / "folder").mkdir()
    for one in precious:
        one.write_text("years of work")
    folder = PrivateFolder()
    path = folder.file("error-0.json")
    assert path is not None
    inside = Path(path).parent
    for number, one in enumerate((*precious, tmp_path / "folder")):
        (inside / f"outside-{number}").symlink_to(one)
    folder.remove()
    assert [one.read_text() for one in precious] == ["years of work"] * 2
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_file_outside_goes_with_it_also_if_the_process_that_made_it_was_killed(tmp_path: Path) -> None:
    folder = PrivateFolder()
    ours, replaced = tmp_path / "ours", tmp_path / "replaced"
    child = os.fork()
    if child == 0:
        try:
            for one in (ours, replaced):
                one.write_text("ours")
                folder.add_outside(str(one))
            replaced.rename(tmp_path / "moved")
            replaced.write_text("of another job")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    folder.remove()
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {
        "moved": "ours",
        "replaced": "of another job",
    }


def test_a_folder_whose_processes_were_all_killed_is_removed_by_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    child = os.fork()
    if child == 0:
        PrivateFolder().file("error.json")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (abandoned,) = tmp_path.iterdir()
    (abandoned / "error.json").write_text("left")
    living, folder = PrivateFolder(), PrivateFolder()
    living.clear()
    assert living.path is not None
    os.rmdir(living.path)
    living.clear()  # it is made again, and locked again
    elsewhere = tmp_path / f"dslaunch-node-{'0' * 8}-1"  # of another boot, perhaps of another host
    elsewhere.mkdir()
    folder.remove_abandoned()
    assert {str(one) for one in tmp_path.iterdir()} == {living.path, folder.path, str(elsewhere)}
    living.remove()
    folder.remove()


def test_a_name_that_a_worker_took_by_a_link_or_a_folder_is_not_followed(tmp_path: Path) -> None:
    folder = PrivateFolder()
    path = folder.file("spy-0")
    assert path is not None
    os.symlink(tmp_path / "elsewhere", path)
    assert folder.file("spy-0") == path
    assert not os.path.lexists(path)
    os.mkdir(path)
    assert folder.file("spy-0") is None
    folder.remove()


@pytest.mark.slow
def test_a_worker_cannot_have_a_file_removed_or_the_agent_wait_by_what_it_leaves_there(
    tmp_path: Path,
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    (tmp_path / "train.py").write_text(
        "import os, sys\n"
        "path = os.environ['TORCHELASTIC_ERROR_FILE']\n"
        f"os.symlink({str(precious)!r}, os.path.join(os.path.dirname(path), 'outside-1'))\n"
        f"os.symlink({str(precious)!r}, os.path.join(os.path.dirname(path), 'x'))\n"
        "os.mkfifo(path)\n"
        "sys.exit(4)\n"
    )
    job = Job(tmp_path, ["train.py"])
    try:
        assert job.wait() == 4, job.err
    finally:
        job.end()
    assert precious.read_text() == "years of work"
