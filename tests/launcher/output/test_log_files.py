from __future__ import annotations

import errno
import os
import re
import stat
import time
from pathlib import Path

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.output import log_files
from dslaunch.launcher.output.log_files import RankFiles, after


def begun(folder: Path, num_ranks: int = 2) -> RankFiles:
    files = RankFiles(log_dir=str(folder), each_rank_dir=None)
    files.begin(range(num_ranks))
    return files


def contents(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def test_each_rank_has_a_file_for_each_stream(tmp_path: Path) -> None:
    files = begun(tmp_path / "new" / "logs", 2)
    done: list[int] = []
    files.put(0, 1, b"a\n", lambda: done.append(0))
    files.put(1, 2, b"\xff\n", lambda: done.append(1))
    files.put(0, 1, b"b\nc\n", lambda: done.append(2))
    assert files.finish(10)
    assert done == [0, 1, 2]
    assert files.folder is not None
    assert contents(files.folder) == {
        "attempt_0/rank000.stdout.log": b"a\nb\nc\n",
        "attempt_0/rank000.stderr.log": b"",
        "attempt_0/rank001.stdout.log": b"",
        "attempt_0/rank001.stderr.log": b"\xff\n",
    }


def test_the_names_of_many_ranks_sort(tmp_path: Path) -> None:
    files = begun(tmp_path, 1001)
    assert files.folder is not None
    names = sorted(one.name for one in (files.folder / "attempt_0").glob("*.stdout.log"))
    assert names == [f"rank{rank:04}.stdout.log" for rank in range(1001)]


def test_a_node_s_part_of_the_ranks_keeps_their_numbers(tmp_path: Path) -> None:
    files = RankFiles(log_dir=str(tmp_path), each_rank_dir=None)
    files.begin([998, 1000])
    files.put(1000, 1, b"a\n", None)
    assert files.finish(10)
    assert files.folder is not None
    found = contents(files.folder)
    assert found["attempt_0/rank1000.stdout.log"] == b"a\n"
    assert len(found) == 4
    assert "attempt_0/rank0998.stderr.log" in found


def test_each_attempt_has_a_folder_and_may_have_fewer_ranks(tmp_path: Path) -> None:
    files = begun(tmp_path, 2)
    files.put(1, 1, b"first\n", None)
    files.begin([0])
    files.put(0, 1, b"second\n", None)
    assert files.finish(10)
    assert files.folder is not None
    found = {name: data for name, data in contents(files.folder).items() if data}
    assert found == {"attempt_0/rank001.stdout.log": b"first\n", "attempt_1/rank000.stdout.log": b"second\n"}


def test_runs_do_not_share_a_folder_and_latest_is_the_last_one(tmp_path: Path) -> None:
    folders = [begun(tmp_path).folder for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(one is not None and re.fullmatch(r"\d{8}-\d{6}(-\d+)?", one.name) for one in folders)
    assert folders == sorted(folders, key=str)
    link = tmp_path / "latest"
    assert os.readlink(link) == str(folders[-1] and folders[-1].name)
    assert {one.name for one in tmp_path.iterdir()} == {"latest", *(one.name for one in folders if one)}


def test_something_else_called_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "mine").touch()
    files = begun(tmp_path)
    assert files.warning == f"{tmp_path}/latest does not point to this run: it is there already and not ours"
    assert (tmp_path / "latest" / "mine").exists()


def test_one_file_for_both_streams_is_named_as_deepspeed_does(tmp_path: Path) -> None:
    files = RankFiles(log_dir=None, each_rank_dir=str(tmp_path / "logs"))
    files.begin([0, 1])
    files.put(1, 1, b"a\n", None)
    files.put(1, 2, b"b\n", None)
    files.put(1, 1, b"c\n", None)
    assert files.finish(10)
    assert files.folder is None
    found = contents(tmp_path / "logs")
    assert sorted(re.sub(r"^\d{14}_", "", name) for name in found) == ["rank0.log", "rank1.log"]
    assert b"".join(found.values()) == b"a\nb\nc\n"


def test_attempts_and_jobs_of_one_second_do_not_share_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's names have no place for the number of an attempt."""
    monkeypatch.setattr(log_files.time, "time", lambda: 1.0e9)
    files = RankFiles(log_dir=None, each_rank_dir=str(tmp_path))
    for text in (b"first\n", b"second\n"):
        files.begin([0, 1])
        files.put(1, 1, text, None)
    other_job = RankFiles(log_dir=None, each_rank_dir=str(tmp_path))
    other_job.begin([1])
    other_job.put(1, 1, b"third\n", None)
    assert files.finish(10)
    assert other_job.finish(10)
    names = sorted(one.name for one in tmp_path.glob("*_rank1.log"))
    assert [(tmp_path / name).read_bytes() for name in names] == [b"first\n", b"second\n", b"third\n"]
    assert all(re.fullmatch(r"\d{14}_rank1\.log", name) for name in names)


def test_both_kinds_at_once(tmp_path: Path) -> None:
    files = RankFiles(log_dir=str(tmp_path / "a"), each_rank_dir=str(tmp_path / "b"))
    files.begin([0])
    done: list[int] = []
    files.put(0, 1, b"a\n", lambda: done.append(0))
    assert files.finish(10)
    assert done == [0]
    assert sorted(contents(tmp_path / "b").values()) == [b"a\n"]
    assert sorted(contents(tmp_path / "a").values())[-1] == b"a\n"


def test_more_files_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MAX_OPEN_FILES", 3)
    files = begun(tmp_path, 10)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        for rank in range(10):
            files.put(rank, 1, b"%d\n" % number, None)
    assert files.finish(10)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert files.folder is not None
    for rank in range(10):
        assert (files.folder / f"attempt_0/rank{rank:03}.stdout.log").read_bytes() == b"0\n1\n2\n3\n4\n"


@pytest.mark.parametrize("option", ["log_dir", "each_rank_dir"])
def test_a_file_is_not_a_folder(option: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    given = {"log_dir": None, "each_rank_dir": None, option: str(tmp_path / "file")}
    with pytest.raises(LaunchError, match=r"--\w+: .*/file is a file; give a folder$"):
        RankFiles(**given).begin([0])


def test_a_folder_that_cannot_be_made_is_one_sentence() -> None:
    with pytest.raises(
        LaunchError, match=r"^--log_dir: cannot make /proc/logs: .*; give a folder that can be"
    ):
        begun(Path("/proc/logs"))


def test_a_full_disk_is_one_sentence_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = begun(tmp_path, 2)

    def write(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(log_files.os, "write", write)
    done: list[int] = []
    for number in range(100):
        files.put(number % 2, 1, b"a\n", lambda number=number: done.append(number))  # type: ignore[misc]
    assert files.finish(10)
    assert done == list(range(100))
    assert files.failure is not None
    assert files.failure.exit_code == 2
    assert re.fullmatch(
        r"cannot write to .*/attempt_0/rank000.stdout.log: No space left on device; "
        "free some space, or give --log_dir another folder",
        str(files.failure),
    )


def test_a_disk_that_turns_out_full_when_files_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = begun(tmp_path, 1)
    files.put(0, 1, b"a\n", None)
    close = os.close

    def fail(fd: int) -> None:
        close(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(log_files.os, "close", fail)
    assert files.finish(10)
    assert str(files.failure).startswith("cannot write the log files to their end: ")


def test_a_call_is_made_when_all_parts_are_done() -> None:
    made: list[int] = []
    one = after(3, lambda: made.append(0))
    one()
    one()
    assert made == []
    one()
    assert made == [0]


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(one.stat().st_mode) for one in folder.rglob("*") if one.is_file()}


@pytest.mark.parametrize(
    ("of_folder", "of_files"),
    [(0o755, 0o600), (0o777, 0o640), (0o1777, 0o600), (0o2750, 0o640), (0o700, 0o600)],
)
def test_only_this_user_reads_the_files_unless_the_folder_was_made_for_others(
    of_folder: int, of_files: int, tmp_path: Path
) -> None:
    tmp_path.chmod(of_folder)
    files = RankFiles(log_dir=str(tmp_path), each_rank_dir=str(tmp_path / "each"))
    files.begin([0])
    assert files.folder is not None
    assert modes(files.folder) == {of_files}
    inherits = of_folder & stat.S_ISGID
    assert modes(tmp_path / "each") == {of_files if inherits else 0o600}
    assert files.finish(10)


def test_a_log_file_that_another_user_planted_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files.os.path, "lexists", lambda path: False)  # planted after we looked
    for second in range(3):
        name = time.strftime("%Y%m%d%H%M%S", time.localtime(time.time() + second))
        (tmp_path / f"{name}_rank0.log").symlink_to(tmp_path / "precious")
    files = RankFiles(log_dir=None, each_rank_dir=str(tmp_path))
    with pytest.raises(LaunchError, match="cannot write to"):
        files.begin([0])
    assert not (tmp_path / "precious").exists()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_latest_that_is_not_ours_stays(kind: str, tmp_path: Path) -> None:
    link = tmp_path / "latest"
    (tmp_path / "mine").write_text("years of work")
    if kind == "file":
        link.write_text("years of work")
    else:
        link.symlink_to("mine")
    files = begun(tmp_path)
    assert "latest does not point to this run: it is there already and not ours" in files.warning
    assert link.read_text() == "years of work"
    assert files.finish(10)
