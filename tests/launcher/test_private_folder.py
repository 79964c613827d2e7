from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dslaunch.launcher.private_folder import PrivateFolder


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
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


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
