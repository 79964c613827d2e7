"""The picture of the README shows the figures that docs/reference/benchmarks.md has now."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.overview import GUIDE, PICTURE, figures, shown

TEXT = GUIDE.read_text(encoding="utf-8")


def test_the_picture_shows_the_figures_of_the_tables() -> None:
    wanted = json.loads(json.dumps(asdict(figures(TEXT))))
    assert shown(PICTURE) == wanted, "draw it again: python benchmarks/overview.py"


def test_the_tables_are_read_as_they_stand() -> None:
    found = figures(TEXT)
    assert list(found.start_s["dslaunch"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert set(found.start_s["deepspeed + pdsh"]) == {"1", "2", "4", "8", "16"}  # it was stopped there
    for tool, row in (("dslaunch", "dslaunch 3"), ("FSDP2", "FSDP2"), ("DeepSpeed", "DeepSpeed 3")):
        (line,) = (
            line
            for line in TEXT.splitlines()
            if line.startswith(f"| {row} |") and "." not in line and float(line.split("|")[4]) > 100
        )
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert [f"{value:g}" for value in found.step_ms[tool].values()] == [
            cells[place] for place in (2, 3, 5, 6)
        ]
    for case, ours in found.peak_mb["dslaunch"].items():
        assert f" {ours:g} / {found.peak_mb['DeepSpeed'][case]:g} = " in TEXT


def test_a_page_without_the_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="no tables of `make bench-launch`"):
        figures(TEXT.replace("bench-launch`: begin", "bench-other`: begin"))
    with pytest.raises(ValueError, match="no table whose first column is 'hosts'"):
        figures(TEXT.replace("| hosts | dslaunch |", "| machines | dslaunch |"))


def test_a_picture_without_figures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="draw it with"):
        shown(GUIDE.with_name("zero.png"))
