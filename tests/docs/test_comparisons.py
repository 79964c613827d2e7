"""Every place in which ranks tell each other what they have is in docs/design/comparisons.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
RUNTIME = CHECKOUT / "runtime"
PAGE = (CHECKOUT / "docs" / "design" / "comparisons.md").read_text()

Telling = tuple[str, str, str]  # file, function, what is called

_TELLING = (
    "agree",
    "all_gather_float64",
    "all_gather_numbers",
    "all_gather_object",
    "all_gather_objects",
    "fail_together",
    "gather_objects",
    "start_all_gather_float64",
    "start_all_gather_numbers",
)
_OF_SEQUENCES = "gather"  # of SequenceRanks
# A program's own collectives, and the methods that the others call.
_MEANS = ("compat/comm.py", "comm/rank_group.py", "sequence/exchange.py")


def tellings_in(source: str, file: str) -> set[Telling]:
    found: set[Telling] = set()

    def look(node: ast.AST, where: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            where = (*where, node.name)
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            if name in _TELLING or (name == _OF_SEQUENCES and owner.endswith("ranks")):
                found.add((file, ".".join(where), name))
        for child in ast.iter_child_nodes(node):
            look(child, where)

    look(ast.parse(source), ())
    return found


def in_the_runtime() -> set[Telling]:
    found: set[Telling] = set()
    for path in sorted(RUNTIME.rglob("*.py")):
        file = str(path.relative_to(RUNTIME))
        found |= set() if file in _MEANS else tellings_in(path.read_text(), file)
    return found


def in_the_page() -> set[Telling]:
    rows = re.findall(r"^\| `([^`]+)` `([^`]+)` \| `([^`]+)` \|", PAGE, re.MULTILINE)
    return {(file, function, call) for file, function, call in rows}


def test_every_telling_is_in_the_page_and_the_page_has_no_other() -> None:
    code, page = in_the_runtime(), in_the_page()
    missing = "".join(f"\n  | `{file}` `{where}` | `{what}` |" for file, where, what in sorted(code - page))
    assert not code - page, (
        f"say in docs/design/comparisons.md what is compared, and what may differ:{missing}"
    )
    assert not page - code, f"in docs/design/comparisons.md, but not in runtime/: {sorted(page - code)}"


def test_every_row_says_what_is_told_among_whom_when_and_what_for() -> None:
    for line in PAGE.splitlines():
        if line.startswith("| `"):
            cells = [one.strip() for one in line.strip("|").split(" | ")]
            assert len(cells) == 5, line
            assert all(cells), line
