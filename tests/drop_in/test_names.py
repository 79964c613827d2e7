"""The table of names, the package that serves it, and DeepSpeed itself agree."""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from dslaunch import drop_in
from dslaunch.drop_in.names import MODULES, modules, passed_on
from dslaunch.drop_in.names.table import TOPICS, NameFate

PATH = Path(drop_in.FOLDER)
ROOT = Path(__file__).parents[2]
DEEPSPEED = ROOT / ".venv" / "deepspeed" / "deepspeed"
NOISE = {"input", "inf"}  # an accident of Python 2, and a number of torch's
NEW = {"deepspeed.zero", "deepspeed.checkpointing"}  # attributes of the package there, which are modules here
SERVED = {name for name, module in MODULES.items() if module.why is None}
MODULES_FILE = Path(modules.__file__)
MODULES_HEAD = '''\
"""Every module of DeepSpeed 0.19.8, by the package that it lies in.

Read when a program imports one. `python tests/drop_in/test_names.py` writes it.
"""

from __future__ import annotations

FOLDERS: dict[str, str] = {
'''

PASSED_ON_FILE = Path(passed_on.__file__)
PASSED_ON_HEAD = '''\
"""Names that a module of DeepSpeed 0.19.8 has because it imports them from another one: programs take them
from either.

By module, and by the module that they come from; "here=there" has another name there. Only of modules of
which there is something here. Read when a module is asked for a name that it has no line for.
`python tests/drop_in/test_names.py` writes it.
"""

from __future__ import annotations

PASSED_ON: dict[str, dict[str, str]] = {
'''

needs_deepspeed = pytest.mark.skipif(not DEEPSPEED.is_dir(), reason="DeepSpeed is not there to compare with")


@cache
def deepspeed_modules() -> dict[str, Path]:
    """Each module of DeepSpeed's, and its file."""
    found = {}
    for file in sorted(DEEPSPEED.rglob("*.py")):
        parts = file.relative_to(DEEPSPEED.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def folders() -> dict[str, str]:
    """Package -> the names of the modules in it."""
    inner: dict[str, list[str]] = {}
    for name, file in sorted(deepspeed_modules().items()):
        if file.name == "__init__.py":
            inner.setdefault(name, [])
        if "." in name:
            folder, _, last = name.rpartition(".")
            inner.setdefault(folder, []).append(last)
    return {folder: " ".join(names) for folder, names in sorted(inner.items())}


def entry(indent: int, key: str, words: str) -> list[str]:
    """The lines of one key of a dict whose value is `words`, as ruff formats them."""
    margin = " " * indent
    line = f'{margin}"{key}": "{words}",'
    if len(line) <= 110:
        return [line]
    first, *rest = textwrap.wrap(words, 110 - indent - 7)
    rows = [f'{margin}    "{row}' for row in (first, *rest)]
    return [f'{margin}"{key}": (', *[f'{row} "' for row in rows[:-1]], f'{rows[-1]}"', f"{margin}),"]


def modules_text() -> str:
    lines = []
    for folder, names in folders().items():
        lines += entry(4, folder, names)
    return MODULES_HEAD + "\n".join(lines) + "\n}\n"


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What runs when a module is imported, the branches of conditions included."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from statements([*node.body, *node.orelse])
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)
        else:
            yield node


def imported_from(name: str, file: Path, node: ast.ImportFrom) -> str:
    """The module that `from ... import` in this one means."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def passed_on_names() -> dict[str, dict[str, str]]:
    """Module -> where the names come from that it has from elsewhere in DeepSpeed -> the names."""
    files = deepspeed_modules()
    found: dict[str, dict[str, str]] = {}
    for name in sorted(SERVED & files.keys()):
        own = deepspeed_names(files[name]) | {one for row in MODULES[name].rows for one in row.names} | NOISE
        homes: dict[str, tuple[str, str]] = {}
        for node in statements(ast.parse(files[name].read_text(encoding="utf-8")).body):
            home = imported_from(name, files[name], node) if isinstance(node, ast.ImportFrom) else ""
            if home.partition(".")[0] != "deepspeed" or home == name:
                continue
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                taken = sorted(deepspeed_names(files[home])) if alias.name == "*" else [alias.name]
                homes |= {(alias.asname or one): (home, one) for one in taken if f"{home}.{one}" not in files}
        for one, (home, there) in sorted(homes.items()):
            if one not in own and not one.startswith("_"):
                words = found.setdefault(name, {}).get(home, "")
                found[name][home] = f"{words} {one if one == there else f'{one}={there}'}".strip()
    return found


def passed_on_text() -> str:
    lines = []
    for name, homes in passed_on_names().items():
        lines.append(f'    "{name}": {{')
        for home, words in homes.items():
            lines += entry(8, home, words)
        lines.append("    },")
    return PASSED_ON_HEAD + "\n".join(lines) + "\n}\n"


@needs_deepspeed
def test_the_list_of_modules_is_deepspeed_s() -> None:
    """To write it: python tests/drop_in/test_names.py"""
    assert folders() == modules.FOLDERS


@pytest.mark.slow
@needs_deepspeed
def test_the_names_that_are_passed_on_are_deepspeed_s() -> None:
    """To write them: python tests/drop_in/test_names.py"""
    assert passed_on_names() == passed_on.PASSED_ON


def test_only_the_package_itself_is_a_file() -> None:
    assert [path.relative_to(PATH) for path in PATH.rglob("*.py")] == [Path("deepspeed/__init__.py")]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_name_that_is_served_is_there(name: str) -> None:
    module = MODULES[name]
    assert module.why is None or module.topic in TOPICS
    for row in module.rows:
        assert row.fate in (NameFate.WORKS, NameFate.MAPPED) or row.topic in TOPICS
        for theirs in row.names if row.fate != NameFate.REFUSED else ():
            home, attribute = row.home_of(theirs)
            found = importlib.import_module(home)
            assert not attribute or hasattr(found, attribute), f"{name}.{theirs} -> {home}:{attribute}"


@cache
def deepspeed_names(file: Path) -> set[str]:
    """What a module of DeepSpeed's defines, and what a package passes on: read and not run."""
    is_package = file.name == "__init__.py"

    def names(body: list[ast.stmt]) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.If | ast.Try):
                yield from names(
                    [
                        *node.body,
                        *node.orelse,
                        *(one for h in getattr(node, "handlers", []) for one in h.body),
                    ]
                )
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Assign):
                targets = [one for target in node.targets for one in ast.walk(target)]
                yield from (one.id for one in targets if isinstance(one, ast.Name))
            elif isinstance(node, ast.ImportFrom) and is_package and node.level == 1:
                for alias in node.names:
                    inner = file.parent.joinpath(*(node.module or "").split("."))
                    inner = inner / "__init__.py" if inner.is_dir() else inner.with_suffix(".py")
                    yield from deepspeed_names(inner) if alias.name == "*" else [alias.asname or alias.name]
            elif isinstance(node, ast.ImportFrom) and is_package and node.level:
                yield from (alias.asname or alias.name for alias in node.names)

    return {
        name for name in names(ast.parse(file.read_text(encoding="utf-8")).body) if not name.startswith("_")
    }


@needs_deepspeed
@pytest.mark.parametrize("name", sorted(SERVED))
def test_the_table_has_every_public_name_of_deepspeed_s_module(name: str) -> None:
    file = deepspeed_modules().get(name)
    if file is None:
        assert name in NEW, f"{name} is no module of DeepSpeed's"
        return
    known = {one for row in MODULES[name].rows for one in row.names}
    below = {one.removeprefix(f"{name}.").split(".")[0] for one in MODULES if one.startswith(f"{name}.")}
    assert sorted(deepspeed_names(file) - known - below - NOISE) == []


def deepspeed_values(file: Path) -> dict[str, object]:
    """The constants of a module of DeepSpeed's that are written out in it."""
    found = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return {name: value for name, value in found.items() if name.isupper()}


@needs_deepspeed
@pytest.mark.parametrize(
    "name",
    ["deepspeed.runtime.lr_schedules", "deepspeed.runtime.constants", "deepspeed.checkpoint.constants"],
)
def test_a_constant_that_is_served_has_the_value_that_deepspeed_gives_it(name: str) -> None:
    theirs = deepspeed_values(deepspeed_modules()[name])
    homes = {one: row.home_of(one) for row in MODULES[name].rows for one in row.names if row.names[one]}
    ours = {one: getattr(importlib.import_module(home), key) for one, (home, key) in homes.items()}
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 20
    assert {one: ours[one] for one in shared} == {one: theirs[one] for one in shared}


WALK = """
import importlib, json, sys
failures = []
for name, wanted in json.load(sys.stdin).items():
    try:
        importlib.import_module(name)
        exec(f"from {name} import {', '.join(wanted)}" if wanted else "", {})
    except Exception as error:
        failures.append(f"{name}: {type(error).__name__}: {error}")
print(json.dumps(failures))
"""


@pytest.mark.slow
@needs_deepspeed
def test_every_module_and_every_public_name_of_deepspeed_can_be_imported() -> None:
    """In a process of its own; what is not here is a stand-in, see test_stand_in.py."""
    wanted = {name: sorted(deepspeed_names(file) - NOISE) for name, file in deepspeed_modules().items()}
    for name, homes in passed_on_names().items():
        wanted[name] += [one.partition("=")[0] for words in homes.values() for one in words.split()]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WALK],
        env={**os.environ, "PYTHONPATH": drop_in.FOLDER},
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(wanted) > 700
    assert json.loads(done.stdout) == []


if __name__ == "__main__":
    MODULES_FILE.write_text(modules_text())
    PASSED_ON_FILE.write_text(passed_on_text())
