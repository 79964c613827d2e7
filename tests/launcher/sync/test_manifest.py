"""The walk through a folder: what is read, what is known from the last time, what cannot be sent."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.host import Host
from dslaunch.launcher.sync import manifest as module
from dslaunch.launcher.sync.manifest import walk
from dslaunch.launcher.sync.sync_job import root_on
from dslaunch.launcher.sync.target import Marker, checked_folder
from dslaunch.launcher.wire.manifest import pack_piece, unpack_piece

OLD = (1e9, 1e9)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def reads_of(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files that a walk reads."""
    read, names = module._Walker._read, []

    def noting(self: module._Walker, path: bytes, *more: object) -> object:
        names.append(path)
        return read(self, path, *more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(module._Walker, "_read", noting)
        walk(bytes(here))
    return names


def test_what_has_not_changed_is_not_read_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (here / name).write_text(name)
        os.utime(here / name, OLD)
    assert reads_of(here, monkeypatch) == [b"a", b"b", b"c"]
    assert reads_of(here, monkeypatch) == []
    (here / "b").write_text("x")  # as long as before
    os.utime(here / "b", OLD)  # and as old
    assert reads_of(here, monkeypatch) == [b"b"]


def test_what_was_changed_just_now_is_read_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have changed once more within one tick of the clock of its file system."""
    (here / "a").write_text("a")
    assert reads_of(here, monkeypatch) == reads_of(here, monkeypatch) == [b"a"]


def test_a_cache_that_cannot_be_read_or_written_costs_time_only(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "a").write_text("a")
    os.utime(here / "a", OLD)
    first = walk(bytes(here))
    (cache,) = (tmp_path / "cache/dslaunch/sync").iterdir()
    for text in ("", "[]", "[" * 100_000, "[1, [[1]]]", '[1, [["a", 1, 1, 1, 1, "zz"]]]', "\xff"):
        cache.write_text(text)
        assert walk(bytes(here)) == first
    for device in ("", "/dev/zero"):
        cache.unlink()
        cache.symlink_to(device) if device else os.mkfifo(cache)
        assert walk(bytes(here)) == first
    assert cache.is_file()
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert walk(bytes(here)) == first


def test_a_file_that_does_not_stand_still_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = here / "log.txt"
    path.write_text("x")
    new_digest = module.new_digest

    def writing() -> object:
        with path.open("a") as file:
            file.write("x")
        return new_digest()

    monkeypatch.setattr(module, "new_digest", writing)
    with pytest.raises(LaunchError, match=r"^--sync: log\.txt changed while it was read; wait until"):
        walk(bytes(here))


def test_a_file_that_changes_once_is_read_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = here / "log.txt"
    path.write_text("x")
    new_digest, texts = module.new_digest, ["more"]

    def writing() -> object:
        if texts:
            with path.open("a") as file:
                file.write(texts.pop())
        return new_digest()

    monkeypatch.setattr(module, "new_digest", writing)
    assert walk(bytes(here)).entries[0].size == len("xmore")


def test_a_file_that_cannot_be_read_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root reads everything, so the kernel's answer is put in its mouth."""
    (here / "closed").write_text("x")
    opened = os.open

    def refusing(path: object, *more: object, **named: object) -> int:
        if path == bytes(here / "closed"):
            raise PermissionError(13, "Permission denied", path)
        return opened(path, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(
        LaunchError, match=r"closed cannot be read: Permission denied; let it be read, or name"
    ):
        walk(bytes(here))


def test_what_is_removed_while_the_folder_is_listed_is_left_out(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stays", "gone", "gone too/file", ".gitignore"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).touch()

    def remove(*given: object, **named: object) -> bytes:  # the names are known, and no more
        (here / "gone").unlink()
        shutil.rmtree(here / "gone too")
        return b""

    monkeypatch.setattr(module, "read_rule_file", remove)
    assert [one.path for one in walk(bytes(here)).entries] == [b".gitignore", b"stays"]


def test_what_is_no_file_is_skipped_and_said(here: Path) -> None:
    os.mkfifo(here / "pipe")
    found = walk(bytes(here))
    assert found.entries == ()
    assert found.skipped == ("pipe (pipe)",)


def test_folders_that_jobs_fill_are_left_out(here: Path) -> None:
    (here / "collected/node1").mkdir(parents=True)
    (here / "a/collected").mkdir(parents=True)
    found = walk(bytes(here), besides=[bytes(here / "collected")])
    assert [one.path for one in found.entries] == [b"a", b"a/collected"]


def test_a_home_and_the_root_are_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home/ada"
    (home / "job").mkdir(parents=True)
    (tmp_path / "link").symlink_to(home)
    monkeypatch.setenv("HOME", str(home))
    for given, what in (("/", "the root"), (str(home), "your home"), (str(tmp_path), "above your home")):
        with pytest.raises(LaunchError, match=f"^--sync={given} is {what}"):
            checked_folder(given)
    with pytest.raises(LaunchError, match="is your home"):
        checked_folder(str(tmp_path / "link"))
    with pytest.raises(LaunchError, match="is no folder; give the folder that the job runs in"):
        checked_folder(str(tmp_path / "none"))
    assert checked_folder(str(home / "job")) == bytes(home / "job")


@pytest.mark.parametrize(
    ("cwd_there", "job_cwd", "root"),
    [
        (None, b"/work/job", "/work/job"),
        (None, b"/work/job/sub", "/work/job"),
        ("/scratch/job", b"/work/job", "/scratch/job"),
        ("~/job", b"/work/job", "~/job"),
        ("/scratch/sub", b"/work/job/sub", "/scratch"),
        ("/scratch/sub/", b"/work/job/sub", "/scratch"),
        ("/scratch", b"/elsewhere", "/scratch"),
    ],
)
def test_where_the_folder_goes(cwd_there: str | None, job_cwd: bytes, root: str) -> None:
    assert root_on(Host(name="n", slots=1, cwd=cwd_there), b"/work/job", job_cwd) == root


def test_a_folder_there_that_has_another_name_below_is_refused() -> None:
    with pytest.raises(LaunchError, match="n: cwd=/scratch does not end in sub"):
        root_on(Host(name="n", slots=1, cwd="/scratch"), b"/work/job", b"/work/job/sub")


def test_a_marker_leaves_nothing(here: Path) -> None:
    marker = Marker(bytes(here))
    assert (here / os.fsdecode(marker.path)).exists()
    marker.close()
    assert list(here.iterdir()) == []
    (here / ".dslaunch").mkdir()
    (here / ".dslaunch/sent").touch()
    Marker(bytes(here)).close()
    assert [one.name for one in (here / ".dslaunch").iterdir()] == ["sent"]


@pytest.mark.parametrize("data", [b"", b"x", b"text " * 1000, os.urandom(5000), bytes(1 << 18)])
def test_a_piece_is_unpacked_as_it_was(data: bytes) -> None:
    assert unpack_piece(pack_piece(data)) == data


@pytest.mark.parametrize("piece", [b"", b"\2", b"\1", b"\1no zlib", pack_piece(bytes(9999))[:-1]])
def test_what_is_no_piece_is_refused(piece: bytes) -> None:
    with pytest.raises(ValueError, match="piece"):
        unpack_piece(piece)


def test_a_piece_that_would_fill_the_memory_is_refused() -> None:
    import zlib

    with pytest.raises(ValueError, match="too long"):
        unpack_piece(b"\1" + zlib.compress(bytes(1 << 24)))
