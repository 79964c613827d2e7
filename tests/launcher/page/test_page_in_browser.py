"""The page in a real browser: it draws, asks no network, follows the theme, and survives hostile words."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.page.page import comparison_page, page_of
from dslaunch.launcher.page.read_run import find_source, read_run
from dslaunch.launcher.page.run import Run
from tests.docs.browser import Browser, find_browser
from tests.launcher.made_events import Event, Made, as_lines, write_events
from tests.launcher.page.test_page import write_hostile

PROGRAM = find_browser()
PHONE = (390, 844)  # CSS pixels

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM, tmp_path_factory.mktemp("profile")) as one:
        one.resize(1200, 900)
        yield one


def run_of(path: Path) -> Run:
    source = find_source(str(path))
    assert source is not None
    return read_run(source)


def prefer(browser: Browser, theme: str, *, media: str = "screen") -> None:
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.call("Emulation.setEmulatedMedia", features=features, media=media)


def show(browser: Browser, folder: Path, page: str) -> None:
    """Open the page, and wait until all is drawn."""
    path = folder / "page.html"
    path.write_text(page)
    browser.errors.clear()
    browser.requested.clear()
    browser.open(path.as_uri())
    browser.wait_for("document.documentElement.dataset.painted")


def assert_quiet(browser: Browser) -> None:
    assert browser.errors == []
    assert [one for one in browser.requested if not one.startswith(("file:", "data:", "blob:"))] == []


def background(browser: Browser) -> Any:
    return browser.ask("getComputedStyle(document.body).backgroundColor")


def axis_color(browser: Browser) -> Any:
    return browser.ask(
        "Bokeh.documents[0].roots()[1].below[0].major_label_text_color.value"
        " || Bokeh.documents[0].roots()[1].below[0].major_label_text_color"
    )


def test_a_page_draws_its_charts_in_both_themes_and_asks_no_network(browser: Browser, tmp_path: Path) -> None:
    made = Made(num_hosts=1, slots=2, duration_s=60.0, fails_at=(30.0,), straggler=1, is_plain=True)
    write_events(tmp_path / "events.jsonl", made)
    prefer(browser, "dark")
    show(browser, tmp_path, page_of(run_of(tmp_path)))
    points = browser.ask("dslaunchPoints()")
    few = ("time-line", "starts", "phases-by-rank", "memory")
    assert all(number > 20 for key, number in points.items() if key not in few), points
    assert all(points[key] >= 2 for key in few), points
    assert browser.ask("document.querySelectorAll('.chart').length") == len(points)
    # The charts are pictures in shadow trees: each has a canvas of a size.
    drawn = browser.ask(
        "[...document.querySelectorAll('.chart')].filter(one => one.offsetHeight > 100).length"
    )
    assert drawn == len(points)
    assert background(browser) == "rgb(20, 23, 28)"
    assert axis_color(browser) == "#a0a9b4"
    browser.ask("document.getElementById('theme').click()")
    assert background(browser) == "rgb(255, 255, 255)"
    assert axis_color(browser) == "#57606a"
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
    assert_quiet(browser)
    browser.ask("try { localStorage.clear() } catch (error) {}")


def test_a_small_number_that_never_changes_can_be_read_from_its_axis(
    browser: Browser, tmp_path: Path
) -> None:
    prefer(browser, "light")
    row = {"step": 1, "steps": 1, "step_s": 1.0, "lr": 1e-3, "loss": 1.0}
    events: list[Event] = [
        {"at": 100.0, "event": "job", "name": "flat", "command": ["dslaunch", "train.py"]},
        {"at": 100.0, "event": "attempt", "attempt": 0, "workers": [["node1", 0, 0, 0]], "log_folder": ""},
        *(
            {"at": 101.0 + step, "event": "metrics", "ranks": {"0": {**row, "step": step}}}
            for step in range(1, 5)
        ),
    ]
    (tmp_path / "events.jsonl").write_bytes(as_lines(events))
    run = run_of(tmp_path)
    for page, key in ((page_of(run), "curve-lr"), (comparison_page(run, run_of(tmp_path)), "step-lr")):
        show(browser, tmp_path, page)
        place = f"[...document.querySelectorAll('.chart')].findIndex(one => one.dataset.key == '{key}')"
        low, high = browser.ask(
            f"(range => [range.start, range.end])(Bokeh.documents[0].roots()[{place}].y_range)"
        )
        assert -0.003 < low < 1e-3 < high < 0.003, (key, low, high)
    assert_quiet(browser)


def test_hostile_words_do_nothing(browser: Browser, tmp_path: Path) -> None:
    prefer(browser, "light")
    show(browser, tmp_path, page_of(run_of(write_hostile(tmp_path))))
    assert browser.ask("document.images.length") == 0
    assert browser.ask("document.scripts.length") == 3
    assert "alert('x')" in browser.ask("document.querySelector('h1').textContent")
    assert browser.ask("Object.values(dslaunchPoints()).every(one => one > 0)")
    assert_quiet(browser)


@pytest.mark.exhaustive
def test_two_runs_are_drawn_over_each_other(browser: Browser, tmp_path: Path) -> None:
    for name, lr in (("a", 1e-3), ("b", 2e-3)):
        made = Made(num_hosts=1, slots=2, lr=lr, is_plain=True)
        write_events(tmp_path / name / "events.jsonl", made)
    show(browser, tmp_path, comparison_page(run_of(tmp_path / "a"), run_of(tmp_path / "b")))
    points = browser.ask("dslaunchPoints()")
    assert points["step-loss"] > 20
    assert points["time-steps_per_s"] > 20
    assert_quiet(browser)


@pytest.mark.exhaustive
def test_folded_ranks_on_a_phone_and_on_paper(browser: Browser, tmp_path: Path) -> None:
    made = Made(num_hosts=64, duration_s=40.0, straggler=77, is_plain=True)
    write_events(tmp_path / "events.jsonl", made)
    prefer(browser, "dark")
    browser.resize(*PHONE, is_phone=True)
    try:
        show(browser, tmp_path, page_of(run_of(tmp_path)))
        assert browser.ask("document.documentElement.scrollWidth") <= PHONE[0]
        assert browser.ask("dslaunchPoints()['phases-by-rank']") == 64
        prefer(browser, "dark", media="print")
        assert background(browser) == "rgb(255, 255, 255)"
        assert base64.b64decode(browser.call("Page.printToPDF")["data"]).startswith(b"%PDF")
        assert_quiet(browser)
    finally:
        browser.call("Emulation.setEmulatedMedia", features=[], media="")
        browser.resize(1200, 900)
