"""The page about GPUs names tests that exist, and has the numbers that they hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fake_cuda.features import FEATURES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/design/gpu.md"


def rows_of(title: str) -> list[list[str]]:
    """The cells of the table below a title, without its head."""
    section = re.split(r"^#+ ", PAGE.read_text().split(f"# {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]
    return [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize(
    ("title", "num_rows"),
    [("Faults that are planted, and found", 15), ("What was wrong, and what holds now", 33)],
)
def test_every_fault_has_a_test_that_exists(title: str, num_rows: int) -> None:
    """A file counts until another one is named."""
    rows = rows_of(title)
    assert len(rows) == num_rows
    source = ""
    for row in rows:
        named = re.findall(r"`([\w/]*test_\w+)(\.py)?`", row[-1])
        assert named, row
        for name, is_file in named:
            if is_file:
                folder = ROOT if name.startswith("tests/") else ROOT / "tests/runtime"
                source = (folder / f"{name}.py").read_text()
            else:
                assert f"def {name}(" in source, name


def test_the_waits_of_each_feature_are_those_that_are_counted() -> None:
    rows = [[cell.strip() for cell in row] for row in rows_of("Host waits by feature")]
    assert {name: int(now) for name, _, now, _ in rows} == {
        one.name: sum(one.waits.values()) for one in FEATURES
    }
    assert all(reason for _, _, now, reason in rows if int(now))
