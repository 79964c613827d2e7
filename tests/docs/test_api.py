"""docs/reference/api.md names every public name with the first sentence of its docstring.

    python tests/docs/test_api.py

writes the page anew.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dslaunch

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = CHECKOUT / "docs" / "reference" / "api.md"
HEAD = """# Public names

All names that programs may use, each with the first sentence of its docstring. In Python
`help(dslaunch.initialize)` shows the whole docstring, and the site that `make docs` builds shows all of them,
with their arguments, shapes, units and errors. Names that need torch are loaded when they are first used.
"""


def load_public_names() -> ModuleType:
    """docs/site/public_names.py, which no package holds."""
    path = CHECKOUT / "docs" / "site" / "public_names.py"
    spec = importlib.util.spec_from_file_location("public_names", path)
    if spec is None or spec.loader is None:
        raise AssertionError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


ENTRIES: dict[str, tuple[Any, ...]] = load_public_names().entries_by_module()


def page() -> str:
    parts = [HEAD]
    for module, entries in ENTRIES.items():
        rows = "".join(f"| `{entry.name}` | {entry.kind} | {cell(entry.summary)} |\n" for entry in entries)
        parts.append(f"## {module}\n\n| name | is a | what it is |\n|---|---|---|\n{rows}")
    return "\n".join(parts)


def cell(text: str) -> str:
    """Without what would end the cell, or be markup outside of backquotes."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if place % 2 else part.replace("*", "\\*") for place, part in enumerate(parts))


def test_the_page_is_what_the_docstrings_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: python tests/docs/test_api.py"


def test_pages_for_users_import_public_names_only() -> None:
    pages = [*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/*/**/*.md"), *CHECKOUT.glob("docs/*/**/*.py")]
    pages = [one for one in pages if not {"design", "site"} & set(one.parts)]
    assert len(pages) > 60
    found = [
        f"{page.relative_to(CHECKOUT)}: {line.strip()}"
        for page in pages
        for line in page.read_text().splitlines()
        if re.match(r"\s*(from|import) dslaunch\.runtime\b", line)
    ]
    assert found == []


def test_every_public_name_is_documented() -> None:
    names = {(module, entry.name): entry.summary for module, entries in ENTRIES.items() for entry in entries}
    documented = {name for name, summary in names.items() if summary}
    assert len(documented) / len(names) == 1, sorted(set(names) - documented)
    assert {name for module, name in names if module == "dslaunch"} == set(dslaunch.__all__)


@pytest.mark.parametrize("module", sorted(ENTRIES))
def test_every_public_method_of_a_public_class_is_documented(module: str) -> None:
    home = sys.modules.get(module) or getattr(dslaunch, module.rpartition(".")[2])
    classes = [
        getattr(home, entry.name) for entry in ENTRIES[module] if entry.kind == "class" and entry.source
    ]
    missing = [
        f"{one.__name__}.{name}"
        for one in classes
        for name, member in inspect.getmembers(one)
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, property))
        and (member.fget if isinstance(member, property) else member).__module__.startswith("dslaunch.")
        and not inspect.getdoc(member)
    ]
    assert missing == []


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
