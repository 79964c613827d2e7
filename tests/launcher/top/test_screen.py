"""The screen itself, driven by textual's own pilot: keys, questions, and what changes while one looks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import RichLog

from dslaunch.launcher.registry.known_jobs import look_at
from dslaunch.launcher.registry.record import JobState, read_record, write_record
from dslaunch.launcher.top.dialogs import Question, TextDialog
from dslaunch.launcher.top.screen import Picture, ScreenOutcome, Top
from dslaunch.launcher.top.spans import plain
from tests.launcher.made_events import Made, events_of, write_events
from tests.launcher.registry.records import make_record

TIMEOUT_S = 20.0
pytestmark = pytest.mark.slow
ELSEWHERE = {"host": "another", "boot_id": "another"}  # so it counts as one that runs, without a process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job of two hosts that runs."""
    made = Made(num_hosts=2, duration_s=30, straggler=5, began_at=time.time() - 30)
    folder = make_record(tmp_path, "pretrain", state=JobState.RUNNING, began_at=made.began_at, **ELSEWHERE)
    write_events(folder / "events", made)
    return folder


def add(folder: Path, event: dict[str, Any]) -> None:
    with (folder / "events").open("a") as file:
        file.write(json.dumps(event) + "\n")


def drive(
    folder: Path,
    drive: Callable[[Top, Pilot[ScreenOutcome]], Awaitable[None]],
    *,
    size: tuple[int, int] = (80, 24),
    **given: Any,
) -> ScreenOutcome | None:
    job = look_at(folder)
    assert job is not None

    async def run() -> ScreenOutcome | None:
        app = Top(job, **given)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await drive(app, pilot)
        return app.return_value

    return asyncio.run(run())


def text_of(app: Top) -> str:
    assert app.frame is not None
    return "\n".join(plain(one) for one in app.frame.lines)


async def until(pilot: Pilot[ScreenOutcome], is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        await pilot.pause(0.02)


def test_keys_sort_scroll_and_switch(folder: Path) -> None:
    async def keys(app: Top, pilot: Pilot[ScreenOutcome]) -> None:
        assert "rank 5 on gpu01 holds up the others" in text_of(app)
        await pilot.press("s")
        assert app.view.sort == "host"
        await pilot.press("S", "S")
        assert app.view.sort == app.frame.sorts[-1]  # type: ignore[union-attr]
        await pilot.press("end")
        assert app.view.offset == 2
        await pilot.press("up", "up", "up")
        assert app.view.offset == 0
        await pilot.press("h")
        assert "has rank 5" in text_of(app)
        await pilot.press("h", "question_mark")
        assert isinstance(app.screen, TextDialog)
        await pilot.press("q")
        assert not isinstance(app.screen, TextDialog)
        await pilot.press("q")

    assert drive(folder, keys) == ScreenOutcome("quit")


def test_what_is_drawn_is_the_frame(folder: Path) -> None:
    async def look(app: Top, pilot: Pilot[ScreenOutcome]) -> None:
        await pilot.resize_terminal(160, 50)
        await until(pilot, lambda: app.frame is not None and len(app.frame.lines) == 50)
        await pilot.pause()
        assert app.frame is not None
        picture = app.query_one(Picture)
        assert [picture.render_line(row).text.rstrip() for row in range(50)] == [
            plain(one).rstrip() for one in app.frame.lines
        ]
        assert "pretrain" in app.export_screenshot()

    drive(folder, look, size=(30, 6))


def test_what_comes_is_shown_and_answers_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("dslaunch.launcher.top.screen.ask_stacks", asked.append)

    async def look(app: Top, pilot: Pilot[ScreenOutcome]) -> None:
        at = time.time()
        add(folder, {"at": at, "event": "note", "level": 30, "text": "warning: a new word"})
        await until(pilot, lambda: "warning: a new word" in text_of(app))
        await pilot.press("t")
        assert "the ranks are asked what they do" in text_of(app)
        add(folder, {"at": at, "event": "stacks", "title": "ranks 0-14", "lines": ["train.py:7 in step"]})
        add(folder, {"at": at, "event": "stacks", "title": "rank 15", "lines": ["train.py:9 in [bold]load"]})
        await until(pilot, lambda: isinstance(app.screen, TextDialog))
        await until(pilot, lambda: "train.py:9 in [bold]load" in shown_in(app))
        assert "train.py:7 in step" in shown_in(app)
        await pilot.press("escape")

    drive(folder, look)
    assert len(asked) == 1


def shown_in(app: Top) -> str:
    return "\n".join(line.text for log in app.screen.query(RichLog) for line in log.lines)


def test_stopping_asks_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []
    monkeypatch.setattr(Top, "_stop", lambda _, *, is_now: stopped.append(is_now))

    async def keys(app: Top, pilot: Pilot[ScreenOutcome]) -> None:
        for answers in ("n", "y", "k", "escape"):
            await pilot.press("x")
            assert isinstance(app.screen, Question)
            await pilot.press("z", answers)
            assert not isinstance(app.screen, Question)

    drive(folder, keys)
    assert stopped == [False, True]


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (20, 5), (80, 6), (10, 2)])
def test_a_question_can_be_read_in_a_small_terminal(folder: Path, size: tuple[int, int]) -> None:
    seen: list[str] = []

    async def ask(app: Top, pilot: Pilot[ScreenOutcome]) -> None:
        await pilot.press("x")
        await pilot.pause()
        strips = app.screen._compositor.render_strips()
        seen.append("\n".join(strip.text for strip in strips))
        await pilot.press("n")

    drive(folder, ask, size=size)
    assert "Stop" in seen[0] or size[1] < 4
    words = [line.strip(" \u2502").partition(" ") for line in seen[0].splitlines()]
    keys = [key for key, _, rest in words if key in ("y", "k", "n") and rest.strip()]
    assert keys == ["y", "k", "n"] or "y/k/n" in seen[0]


@pytest.mark.parametrize(("key", "word"), [("d", "quit"), ("a", "console")])
def test_a_watched_job_is_left_as_one_says(folder: Path, key: str, word: str) -> None:
    async def keys(app: Top, pilot: Pilot[ScreenOutcome]) -> None:
        await pilot.press("q", "g")
        assert not isinstance(app.screen, Question)
        await pilot.press("ctrl+c", key)

    assert drive(folder, keys, is_watch=True) == ScreenOutcome(word)


@pytest.mark.parametrize("is_watch", [True, False])
def test_the_end_of_the_job(folder: Path, is_watch: bool) -> None:
    async def end(app: Top, pilot: Pilot[ScreenOutcome]) -> None:
        record = read_record(folder)
        assert record is not None
        write_record(folder, record._replace(state=JobState.ENDED, exit_code=3, verdict="rank 5 failed"))
        if is_watch:
            await until(pilot, lambda: app.return_value is not None)
            return
        await until(pilot, lambda: "ended with exit code 3: rank 5 failed" in text_of(app))
        assert app.return_value is None
        await pilot.press("q")

    assert drive(folder, end, is_watch=is_watch) == ScreenOutcome("ended" if is_watch else "quit")


def test_all_events_at_once_are_read_in_parts(tmp_path: Path) -> None:
    made = Made(num_hosts=8, duration_s=200, began_at=time.time() - 200)
    folder = make_record(tmp_path, "long", state=JobState.RUNNING, began_at=made.began_at, **ELSEWHERE)
    write_events(folder / "events", made)
    last = max(one["ranks"]["0"].get("step", 0) for one in events_of(made) if one.get("ranks"))

    async def look(app: Top, pilot: Pilot[ScreenOutcome]) -> None:
        await until(pilot, lambda: app.watched.state.step == last)

    drive(folder, look)
