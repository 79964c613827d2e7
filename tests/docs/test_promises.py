"""Every test that the page of promises names is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs" / "design" / "promises.md").read_text()
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)


@cache
def names_in(path: Path) -> set[str]:
    if not path.exists():
        return set()
    found = ast.parse(path.read_text()).body
    return {one.name for one in found if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")}


def test_every_test_that_is_named_exists() -> None:
    missing = [f"{file}::{name}" for file, name in NAMED if name not in names_in(CHECKOUT / "tests" / file)]
    assert missing == []


def test_every_promise_is_held_by_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("|---")]
    heads = [line for line in rows if line.rstrip(" |").endswith("held by")]
    assert len(heads) > 5
    assert [line for line in rows if line not in heads and "::test_" not in line] == []
    assert len(NAMED) > len(rows) - len(heads)
    assert PAGE.count("::") == len(NAMED), "a name that was not understood"


def test_the_words_of_a_guide_stand_there() -> None:
    sections = re.split(r"^###? ", PAGE, flags=re.M)
    quoted = {}
    for section in sections:
        if title := re.match(r"The words of `([\w./-]+)`\n", section):
            rows = re.findall(r"^\| (.+?) \| `", section, flags=re.M)
            quoted[title[1]] = [row.replace("\\|", "|") for row in rows]
    assert len(quoted) == 7
    assert min(map(len, quoted.values())) > 1
    for page, words in quoted.items():
        text = " ".join((CHECKOUT / page).read_text().split())
        assert [one for one in words if one not in text] == [], page
