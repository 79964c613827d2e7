"""The pictures of the guide to `dslaunch top` are what it shows."""

from __future__ import annotations

import re
import time

import pytest

from tests.docs.top_pictures import FOLDER, SIZES, picture

MOST_BYTES = 100_000


@pytest.mark.parametrize("name", list(SIZES))
def test_a_picture_is_small_and_loads_nothing(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    assert "url(http" not in text
    assert "href" not in text
    assert "pretrain" in text


@pytest.mark.slow
def test_a_picture_shows_what_the_screen_shows_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make them again by tests/docs/top_pictures.py."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        drawn = picture(SIZES["top.svg"])
    finally:
        monkeypatch.undo()
        time.tzset()
    kept = (FOLDER / "top.svg").read_text(encoding="utf-8")
    assert re.findall(">([^<>]+)</text>", drawn) == re.findall(">([^<>]+)</text>", kept)
