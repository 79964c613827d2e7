"""The folder of the records is this user's alone, or refused with what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.registry.state_folder import readable_folder, state_folder, writable_folder


def test_it_is_made_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a" / "b"))
    folder = writable_folder()
    assert folder == tmp_path / "a" / "b" / "dslaunch" / "jobs"
    for one in (folder, folder.parent):
        assert one.stat().st_mode & 0o777 == 0o700
    assert readable_folder() == folder == writable_folder()


def test_without_the_variable_it_is_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert writable_folder() == tmp_path / ".local" / "state" / "dslaunch" / "jobs"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("XDG_STATE_HOME", "here", "XDG_STATE_HOME=here: it must begin with /; give a whole path"),
        ("HOME", "", "HOME is not set; set it, or set XDG_STATE_HOME to a folder of your own"),
    ],
)
def test_a_place_that_is_none_is_refused(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(LaunchError, match=message):
        state_folder()


def test_a_folder_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = writable_folder()
    folder.chmod(0o750)
    for look in (readable_folder, writable_folder):
        with pytest.raises(LaunchError, match=r"open to other users \(mode 750\).* chmod 700"):
            look()
    folder.chmod(0o700)
    if os.getuid() == 0:
        os.chown(folder, 12345, -1)
        for look in (readable_folder, writable_folder):
            with pytest.raises(LaunchError, match="belongs to the user with id 12345, and you have id 0"):
                look()


def test_a_place_below_a_folder_where_all_may_rename_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "open" / "mine"))
    with pytest.raises(LaunchError, match=r"/open may be written to by every user \(mode 777\), who could "):
        writable_folder()
    (tmp_path / "open").chmod(0o1777)
    assert writable_folder() == tmp_path / "open" / "mine" / "dslaunch" / "jobs"


def test_a_file_in_its_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "dslaunch").write_text("")
    with pytest.raises(LaunchError, match="is no folder; move it away"):
        writable_folder()


@pytest.mark.skipif(os.getuid() != 0, reason="root only")
def test_root_makes_nothing_in_the_home_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(LaunchError, match="belongs to the user with id 12345, not to root; set HOME"):
        writable_folder()
    assert list(tmp_path.iterdir()) == []
