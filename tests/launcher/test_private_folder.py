from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from dslaunch.launcher.private_folder import PrivateFolder


def test_only_its_user_can_enter_it_and_it_goes_with_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
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
    def refuse(prefix: str) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    folder = PrivateFolder()
    assert folder.file("error.json") is None
    folder.remove()
