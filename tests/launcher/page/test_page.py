"""The page of a run: what it says, that hostile words stay words, its size, and that it can be read."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.page.figures import COLORS, GREY
from dslaunch.launcher.page.page import comparison_page, page_of
from dslaunch.launcher.page.read_run import find_source, read_run
from dslaunch.launcher.page.run import Run
from tests.launcher.made_events import (
    BEGAN_AT,
    CONFIG,
    OUT_OF_MEMORY,
    Event,
    Made,
    as_lines,
    events_of,
    write_events,
)

pytestmark = pytest.mark.slow

EVIL = (
    "</script><script>alert('x')</script><img src=http://evil.test/x onerror=alert(1)>"
    "\x00\x1b[31m\u2028 $$x$$ \\(y\\)"
)
CSS = Path(__file__).parents[3] / "launcher" / "page" / "page.css"
TEXT_CONTRAST, GRAPHIC_CONTRAST = 4.5, 3.0  # Web Content Accessibility Guidelines 2.2, AA
LIMIT_BYTES = 3_000_000


def run_of(path: Path) -> Run:
    source = find_source(str(path))
    assert source is not None
    return read_run(source)


ODD = (
    1e308,
    -1e308,
    math.inf,
    -math.inf,
    math.nan,
    5e-324,
    -0.0,
    2**63,
    -(2**70),
    10**400,
    "x",
    None,
    [],
    True,
)


def with_odd_numbers(value: Any, dice: random.Random, share: float) -> Any:
    """The same with some numbers replaced by what a program may tell, or another program may write."""
    if isinstance(value, dict):
        return {key: with_odd_numbers(one, dice, share) for key, one in value.items()}
    if isinstance(value, list):
        return [with_odd_numbers(one, dice, share) for one in value]
    return dice.choice(ODD) if type(value) in (int, float) and dice.random() < share else value


@pytest.mark.parametrize(
    "seed", [0, 1, 6, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(7, 15))]
)
def test_numbers_of_every_size_and_kind_make_a_page(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    made = Made(num_hosts=2, slots=2, duration_s=24.0, fails_at=(12.0,), is_plain=bool(seed % 2), exit_code=0)
    share = dice.choice((0.01, 0.05, 0.3))
    events = [with_odd_numbers(one, dice, share) for one in events_of(made)]
    (tmp_path / "events.jsonl").write_bytes(as_lines(events))
    run = run_of(tmp_path)
    page_of(run)
    comparison_page(run, run)


@pytest.mark.parametrize("losses", [(1e308, -1e308), (1e308, 1e308), (math.inf, 1e-320), (5e-324, -0.0)])
def test_losses_at_the_ends_of_what_a_number_can_be_are_shown(
    losses: tuple[float, float], tmp_path: Path
) -> None:
    runs = []
    for name, loss in zip("ab", losses, strict=True):
        events = [*events_of(Made(num_hosts=1, slots=2, duration_s=20.0, is_plain=True))]
        for row in (row for one in events for row in one.get("ranks", {}).values() if isinstance(row, dict)):
            row["loss"] = loss
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_bytes(as_lines(events))
        runs.append(run_of(tmp_path / name))
    page_of(runs[0])
    comparison_page(*runs)


class Read(HTMLParser):
    """Tags with their attributes, and the text outside of programs and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            self._open.remove(tag)

    def handle_data(self, data: str) -> None:
        if not self._open:
            self.text += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def hostile_events() -> list[Event]:
    """A job all of whose words are made to harm who looks at them."""
    culprit = {
        **{"kind": "rank", "rank": 0, "host": EVIL, "code": 1, "signal": 0, "message": EVIL, "place": EVIL},
        **{"evidence": [EVIL], "traceback": [EVIL, "x" * 10_000_000], "last_lines": [EVIL] * 5000},
    }
    own = {"attempt": 0}
    numbers = {"step": 1, "loss": 1.0, EVIL: 2.0, "state": EVIL, "steps": 1, "step_s": 1.0, "comm_s": 0.5}
    events: list[Event] = [
        {"event": "job", "name": EVIL, "command": ["dslaunch", EVIL], "cwd": EVIL, "version": EVIL},
        {"event": "attempt", **own, "workers": [[EVIL, 0, 0, 0]], "log_folder": EVIL},
        {"event": "phase", **own, "phase": EVIL},
        {"event": "running", **own},
        {"event": "config", "rank": 0, "config": {EVIL: {EVIL: [EVIL, {EVIL: EVIL}]}}},
        *(
            {
                "event": "metrics",
                **own,
                "ranks": {"0": {**numbers, "step": step}},
                "hosts": {EVIL: {"cpu": 0.5}},
            }
            for step in range(1, 6)
        ),
        {"event": "note", "level": 40, "text": EVIL},
        {"event": "stacks", "title": EVIL, "lines": [EVIL]},
        {"event": "hang", "rank": 0, "report": EVIL},
        {"event": "straggler", "rank": 0, "host": EVIL, "cause": EVIL, "share": 0.5, "text": EVIL},
        {"event": "exited", **own, "rank": 0, "host": EVIL, "code": 1, "signal": 0},
        {
            "event": "verdict",
            **own,
            "exit_code": 1,
            "culprit": culprit,
            "others": [culprit],
            "decision": EVIL,
        },
        {"event": "end", "exit_code": 1, "duration_s": 5.0},
    ]
    return [{"at": BEGAN_AT + place, **one} for place, one in enumerate(events)]


def write_hostile(folder: Path) -> Path:
    path = folder / "events.jsonl"
    path.write_bytes(as_lines(hostile_events()))
    return path


def test_a_page_says_how_the_run_went(tmp_path: Path) -> None:
    made = Made(num_hosts=2, slots=2, duration_s=60.0, fails_at=(30.0,), straggler=1, exit_code=0)
    page = page_of(run_of(write_events(tmp_path / "events.jsonl", made)))
    read = Read(page)
    for words in (
        "ended well",
        "dslaunch -H hosts --max_restarts 3 train.py --config 7b.yaml",
        f"rank 3 on gpu02 (local rank 1, pid 4003) exited with code 1: {OUT_OF_MEMORY}",
        "starting again (1 of 3) without gpu02, with spare-1 in its place",
        "rank 1 on gpu01 holds up the others by 88 ms in each step of 400 ms, 22 %: it computes for",
        "no rank has written anything for 60 s",
        "prefetch_bucket_size",
        "Loss: ",
    ):
        assert words in read.text, words
    charts = [one for one in read.of("div") if one.get("class") == "chart"]
    keys = [one["data-key"] for one in charts]
    assert len(keys) == len(set(keys)) > 15
    assert set(keys) > {
        *("curve-loss", "curve-lr", "curve-grad_norm", "curve-own_s"),
        *("phases", "memory", "starts", "time-line"),
    }
    assert all(one["aria-label"] for one in charts)
    assert page.count("<figure>") == page.count(">The numbers</summary>") == len(charts)
    linked = {str(one["href"])[1:] for one in read.of("a")}
    assert linked <= {one.get("id") for one in read.of("section")}


def test_nothing_of_a_page_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    read = Read(page_of(run_of(write_events(tmp_path / "events", Made(num_hosts=1, duration_s=20.0)))))
    assert not [one for one in read.of("script") if "src" in one]
    assert not {"img", "iframe", "object", "embed", "base"} & {name for name, _ in read.tags}
    assert [one["href"] for one in read.of("link")] == ["data:,"]
    (policy,) = [
        one["content"] for one in read.of("meta") if one.get("http-equiv") == "Content-Security-Policy"
    ]
    assert "default-src 'none'" in str(policy)
    assert "http" not in str(policy)
    (script_rule,) = [one for one in str(policy).split(";") if "script-src" in one]
    assert "unsafe" not in script_rule


def test_whatever_a_job_wrote_is_text(tmp_path: Path) -> None:
    page = page_of(run_of(write_hostile(tmp_path)))
    read = Read(page)
    assert len(read.of("script")) == 3
    assert {"img", "iframe"} & {name for name, _ in read.tags} == set()
    assert "alert('x')" in read.text
    assert not re.search("[\x00\x1b\u2028]", read.text)
    assert len(page) < LIMIT_BYTES
    assert "$$x$$" not in page[page.index("docs_json") :]


def test_two_runs_are_compared(tmp_path: Path) -> None:
    first = write_events(tmp_path / "a", Made(num_hosts=1, slots=2, step_s=0.5, duration_s=60.0))
    path = write_events(tmp_path / "b", Made(num_hosts=2, slots=2, step_s=0.5, duration_s=40.0, lr=1e-3))
    changed = json.dumps({**CONFIG, "bf16": {"enabled": False}, "more": 1}, separators=(",", ":"))
    path.write_text(path.read_text().replace(json.dumps(CONFIG, separators=(",", ":")), changed))
    read = Read(comparison_page(run_of(first), run_of(path)))
    text = re.sub(r"\s+", " ", read.text)
    for words in ("config: bf16.enabledtruefalse", "config: more1", "gpu01gpu[01-02]", "steps11070"):
        assert words in text, words
    assert "zero_optimization" not in text
    keys = {one["data-key"] for one in read.of("div") if one.get("class") == "chart"}
    assert {"step-loss", "step-lr", "time-steps_per_s"} <= keys


def write_losses(folder: Path, losses: list[float | str]) -> Path:
    """The events of a run of one rank that told these losses, one a second."""
    folder.mkdir()
    events: list[Event] = [
        {"at": 100.0, "event": "job", "name": folder.name, "command": ["dslaunch", "train.py"]},
        {"at": 100.0, "event": "attempt", "attempt": 0, "workers": [["node1", 0, 0, 0]], "log_folder": ""},
    ]
    for step, loss in enumerate(losses, 1):
        row = {"step": step, "loss": loss, "steps": 1, "step_s": "nan" if loss == "nan" else 1.0}
        events.append({"at": 100.0 + step, "event": "metrics", "ranks": {"0": row}, "hosts": {}, "lines": {}})
    events.append({"at": 200.0, "event": "end", "exit_code": 0, "duration_s": 100.0})
    path = folder / "events.jsonl"
    path.write_bytes(as_lines(events))
    return folder


def test_a_slow_step_counts_as_one_and_the_steps_to_come_are_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = write_losses(tmp_path / name, [])
        rows: list[Event] = [
            {"step": 99, "steps": 99, "step_s": 9.9, "skipped": 0},
            {"step": 100, "steps": 1, "step_s": 10.1, "skipped": 0},
            {"step": 150, "steps": 50, "step_s": 1.0, "skipped": 0},
        ]
        events = [
            {"at": at, "event": "metrics", "ranks": {"0": row | {"total_steps": 500}}}
            for at, row in zip((110.0, 120.0, 121.0), rows, strict=True)
        ]
        path = folder / "events.jsonl"
        path.write_bytes(path.read_bytes() + as_lines(events))
    page = comparison_page(run_of(tmp_path / "a"), run_of(tmp_path / "b"))
    both = Read(page)
    text = re.sub(r"\s+", " ", both.text)
    assert "seconds a step, mean0.140.14" in text  # 21 s for 150
    assert "steps a second, mean4.6364.636" in text  # 51 in 11 s
    assert "steps150 of 500150 of 500" in text
    assert "step-skipped" not in {one.get("data-key") for one in both.of("div")}
    assert '"name":"Scatter"' in page[page.index("docs_json") :]  # two points of the rate are no line
    alone = Read(page_of(run_of(tmp_path / "a")))
    assert "curve-total_steps" not in {one.get("data-key") for one in alone.of("div")}


@pytest.mark.parametrize(
    ("losses", "last"),
    [
        ([2.0, 1.0, "nan", "nan"], "NaN"),
        ([2.0, "inf"], "inf"),
        (["nan", "nan"], "NaN"),
        ([2.0, "nan", 0.5], "0.5"),
    ],
)
def test_a_loss_that_is_no_number_is_not_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, losses: list[float | str], last: str
) -> None:
    run = run_of(write_losses(tmp_path / "a", losses))
    read = Read(page_of(run))
    assert f"last loss{last}" in re.sub(r"\s*\n\s*", "", read.text)
    assert "NaN or infinite" in read.text
    assert "curve-loss" in {one["data-key"] for one in read.of("div") if one.get("class") == "chart"}
    other = run_of(write_losses(tmp_path / "b", [2.0, 1.5]))
    read = Read(comparison_page(run, other))
    text = re.sub(r"\s+", " ", read.text)
    assert f"last loss{last}1.5" in text
    assert "a was NaN or infinite" in text
    assert not caplog.records, "the library of the charts has nothing to complain of"


def brightness(color: str) -> float:
    """Relative luminance. Source: Web Content Accessibility Guidelines 2.2"""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((brightness(one), brightness(other)))
    return (high + 0.05) / (low + 0.05)


def themes() -> list[dict[str, str]]:
    blocks: list[Any] = re.findall(r"\{\s*(--paper[^}]*)\}", CSS.read_text())
    found = [dict(re.findall(r"(--[a-z]+): (#[0-9a-f]{6})", one)) for one in blocks]
    assert len(found) == 4  # light, dark by preference, dark by the button, print
    assert found[1] == found[2]
    assert found[0] == found[3]
    return found[:2]


def test_colors_can_be_told_from_the_background() -> None:
    for theme in themes():
        for paper in (theme["--paper"], theme["--card"]):
            for ink in ("--ink", "--soft", "--link", "--good", "--bad", "--warn"):
                assert contrast(theme[ink], paper) >= TEXT_CONTRAST, (ink, paper)
        for color in (*COLORS, GREY):
            assert contrast(color, theme["--paper"]) >= GRAPHIC_CONTRAST, color


@pytest.mark.exhaustive
@pytest.mark.parametrize(("num_hosts", "interval_s"), [(1, 0.0), (12, 600.0)])
def test_ten_days_are_a_small_page(tmp_path: Path, num_hosts: int, interval_s: float) -> None:
    ten_days = Made(
        num_hosts=num_hosts, duration_s=864_000.0, step_s=10.0, interval_s=interval_s, exit_code=0
    )
    page = page_of(run_of(write_events(tmp_path / "events", ten_days)))
    assert len(page) < LIMIT_BYTES
    assert "240 h" in page
