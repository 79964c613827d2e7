"""Which folders of a host are filled: those that no other user of it can change."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dslaunch.launcher.node.files.sync_place import Trust, Untrusted, open_place
from tests.launcher.sync.pair import sync, tree_of
from tests.launcher.sync.test_owners import brought, folder, refused

MALLORY = 54321

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder(tmp_path / "here", **{"run.sh": b"ours"})
    folder(tmp_path / "here/pkg", file=b"ours")
    return tmp_path / "here"


def given(path: Path) -> None:
    os.chown(path, MALLORY, MALLORY)


@needs_root
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda job: given(job), "job belongs to the user of number 54321"),
        (lambda job: given(job.parent), "way belongs to the user of number 54321"),
        (lambda job: job.chmod(0o777), "job may be written to by every user (mode 777)"),
        (lambda job: job.chmod(0o1777), "job may be written to by every user (mode 1777)"),
        (lambda job: job.parent.chmod(0o757), "way may be written to by every user (mode 757)"),
        (
            lambda job: (os.chown(job, 0, MALLORY), job.chmod(0o775)),
            "written to by the group 54321 (mode 775)",
        ),
        (
            lambda job: (job.rename(job.parent / "real"), job.symlink_to("real"), os.lchown(job, MALLORY, 0)),
            "job belongs",
        ),
        (lambda job: given(folder(job / ".dslaunch")), ".dslaunch there belongs to"),
        (
            lambda job: (folder(job / ".dslaunch"), given(folder(job / ".dslaunch/coming"))),
            "coming there belongs to",
        ),
        (lambda job: given(folder(job / "pkg")), "the folder pkg there belongs to the user of number 54321"),
        (
            lambda job: folder(job / "pkg").chmod(0o777),
            "the folder pkg there may be written to by every user",
        ),
    ],
)
@pytest.mark.parametrize("is_forced", [False, True])
def test_a_folder_that_another_user_can_change_is_not_filled(
    here: Path, tmp_path: Path, change: Callable[[Path], object], words: str, is_forced: bool
) -> None:
    job = folder(folder(tmp_path / "way") / "job")
    change(job)
    before = tree_of(tmp_path / "way")
    assert words in refused(*sync(here, job, is_forced=is_forced))
    after = tree_of(tmp_path / "way")
    assert {name: one for name, one in after.items() if b".dslaunch" not in name} == {
        name: one for name, one in before.items() if b".dslaunch" not in name
    }


@needs_root
def test_a_file_of_another_user_is_not_run(here: Path, tmp_path: Path) -> None:
    """That user could change it while the job runs, though it is equal now."""
    job = folder(tmp_path / "job", **{"run.sh": b"ours"})
    given(job / "run.sh")
    assert "run.sh there was not sent from here" in refused(*sync(here, job))
    brought(*sync(here, job, is_forced=True))
    assert (job / "run.sh").stat().st_uid == 0


@needs_root
def test_a_sticky_folder_on_the_way_is_fine_and_what_is_made_is_closed_to_others(
    here: Path, tmp_path: Path
) -> None:
    way = folder(tmp_path / "way")
    way.chmod(0o1777)
    (way / "link").symlink_to("./inner/../inner")
    umask = os.umask(0)
    try:
        brought(*sync(here, way / "link/deep/job"))
    finally:
        os.umask(umask)
    assert tree_of(way / "inner/deep/job") == tree_of(here)
    modes = [(way / "inner" / name).stat().st_mode for name in ("", "deep", "deep/job")]
    assert [stat.S_IMODE(one) for one in modes] == [0o755] * 3
    brought(*sync(here, way / "link/deep/job"))


def test_a_mode_that_was_asked_for_is_given(here: Path, tmp_path: Path) -> None:
    (here / "pkg").chmod(0o777)
    for _ in range(2):
        brought(*sync(here, tmp_path / "job"))
    assert stat.S_IMODE((tmp_path / "job/pkg").stat().st_mode) == 0o777


def test_a_folder_that_was_opened_to_others_is_closed_again_if_nothing_of_theirs_is_in_it(
    here: Path, tmp_path: Path
) -> None:
    pkg = tmp_path / "job/pkg"
    (here / "pkg").chmod(0o777)
    brought(*sync(here, tmp_path / "job"))
    (pkg / "theirs.py").touch()
    (here / "pkg").chmod(0o755)
    assert "pkg there may be written to by every user (mode 777)" in refused(*sync(here, tmp_path / "job"))
    (pkg / "theirs.py").unlink()
    brought(*sync(here, tmp_path / "job"))
    assert stat.S_IMODE(pkg.stat().st_mode) == 0o755
    pkg.chmod(0o777)  # by the host's user
    brought(*sync(here, tmp_path / "job"))
    assert stat.S_IMODE(pkg.stat().st_mode) == 0o755


def test_a_sticky_folder_is_closed_to_others(here: Path, tmp_path: Path) -> None:
    (here / "pkg").chmod(0o1777)
    for _ in range(2):
        brought(*sync(here, tmp_path / "job"))
        assert stat.S_IMODE((tmp_path / "job/pkg").stat().st_mode) == 0o755


def test_links_that_lead_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    with pytest.raises(OSError, match="symbolic links"):
        open_place(bytes(tmp_path / "one/job"), Trust())


@needs_root
def test_a_folder_that_is_replaced_while_it_is_looked_at_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was looked at is what is used: the name may mean another folder a moment later."""
    job = folder(folder(tmp_path / "way") / "job")
    open_now, swapped = os.open, []

    def swapping(path: object, *more: object, **named: object) -> int:
        fd: int = open_now(path, *more, **named)  # type: ignore[arg-type]
        if path == b"way" and not swapped:
            swapped.append(True)
            (tmp_path / "way").rename(tmp_path / "old")
            given(folder(folder(tmp_path / "way") / "job"))
        return fd

    monkeypatch.setattr(os, "open", swapping)
    inode = job.stat().st_ino
    fd = open_place(bytes(job), Trust())
    assert os.fstat(fd).st_ino == inode
    os.close(fd)
    with pytest.raises(Untrusted):
        open_place(bytes(job), Trust())
