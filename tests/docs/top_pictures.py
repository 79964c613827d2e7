"""The pictures of docs/launch/watching.md: the screen of `dslaunch top` on a run that is made up.

PYTHONPATH=. python tests/docs/top_pictures.py
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from dslaunch.launcher.registry.known_jobs import KnownJob
from dslaunch.launcher.registry.record import JobState, read_record
from dslaunch.launcher.top.screen import Top
from tests.launcher.made_events import Made, write_events
from tests.launcher.registry.records import make_record

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "launch"
MADE = Made(
    num_hosts=4,
    duration_s=420.0,
    fails_at=(150.0,),
    straggler=13,
    cause="data",
    total_steps=20_000,
    step_s=0.5,
)
SIZES = {"top.svg": (80, 24), "top-wide.svg": (160, 50)}
_FONT = "DejaVu Sans Mono, Menlo, Consolas, monospace"


def picture(size: tuple[int, int], made: Made = MADE) -> str:
    """The screen as SVG, which loads nothing from elsewhere."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_record(Path(name), "pretrain", began_at=made.began_at)
        write_events(folder / "events", made)
        record = read_record(folder)
        if record is None:
            raise AssertionError(folder)
        job = KnownJob(folder=folder, record=record._replace(state=JobState.RUNNING), state="running")
        now = made.began_at + made.duration_s
        with (
            patch("dslaunch.launcher.top.watched.now_of", lambda one: one),
            patch("dslaunch.launcher.top.screen.time.time", lambda: now),
        ):
            return _plain_svg(asyncio.run(_drawn(job, size)))


async def _drawn(job: KnownJob, size: tuple[int, int]) -> str:
    app = Top(job)
    async with app.run_test(size=size) as pilot:
        while not app.watched.look():
            pass
        app._look()
        await pilot.pause()
        return app.export_screenshot(title="dslaunch top")


def _plain_svg(text: str) -> str:
    """Without fonts of another server, and without names that are new each time."""
    text = re.sub(r"@font-face \{.*?\}", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: *[^;]*;", f"font-family: {_FONT};", text)
    text = re.sub(r"terminal-\d+", "t", text)
    return re.sub(r"\n\s*\n+", "\n", text)


def main() -> None:
    os.environ["TZ"] = "UTC"
    time.tzset()
    for name, size in SIZES.items():
        (FOLDER / name).write_text(picture(size), encoding="utf-8")
        print(FOLDER / name, (FOLDER / name).stat().st_size)


if __name__ == "__main__":
    main()
