"""Where a page is written, and what it is never written over."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest

from dslaunch.launcher.command_line import report
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.page.page import GENERATOR
from dslaunch.launcher.page.page_file import check_page_place, default_place, write_page

OURS = f'<!doctype html>\n<html><head><meta name="generator" content="{GENERATOR}">'


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("train.3f2a", "train.3f2a.html"),
        ("20260801-141503", "20260801-141503.html"),
        ("../../etc/passwd", "etc-passwd.html"),
        ("a b<c>", "a-b-c.html"),
        ("...", "run.html"),
    ],
)
def test_a_page_is_called_as_its_run_and_is_in_this_folder(label: str, name: str) -> None:
    assert default_place(label) == Path(name)


def test_a_page_of_ours_is_written_over_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    check_page_place(path)
    assert write_page(path, OURS) == len(OURS)
    assert path.stat().st_mode & 0o077 == 0
    check_page_place(path)
    write_page(path, OURS + "more")
    assert path.read_text().endswith("more")
    path.write_text("<html>mine")
    with pytest.raises(LaunchError, match="is no page of dslaunch report"):
        check_page_place(path)
    with pytest.raises(LaunchError, match="is a folder; give the name of a file"):
        check_page_place(tmp_path)
    link = tmp_path / "link.html"
    link.symlink_to(path)
    with pytest.raises(LaunchError, match="is a symbolic link"):
        check_page_place(link)
    check_page_place(Path("/dev/stdout"))


def test_a_page_is_shown_in_the_browser_or_it_is_said_that_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: not asked.append(url))
    report._open(tmp_path / "a.html")
    assert asked == [f"file://{tmp_path}/a.html"]
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    with pytest.raises(LaunchError, match=r"there is no browser here that could show .*a\.html; copy it to"):
        report._open(tmp_path / "a.html")
