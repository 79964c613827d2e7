"""The table of names, the files of the package that serve it, and DeepSpeed itself agree."""

from __future__ import annotations

import ast
import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslaunch import drop_in
from dslaunch.drop_in.names import MODULES
from dslaunch.drop_in.names.table import TOPICS, Fate

PATH = Path(drop_in.FOLDER)
TEXT = '''"""`{name}` of dslaunch: see dslaunch/drop_in/names."""

from dslaunch.drop_in.serve import serve

__getattr__, __dir__ = serve("{name}")
'''
ROOT = Path(__file__).parents[2]
DEEPSPEED = ROOT / ".venv" / "deepspeed" / "deepspeed"
NOISE = {"input"}  # an accident of Python 2
NEW = {"deepspeed.zero", "deepspeed.checkpointing"}  # attributes of the package there, which are modules here
SERVED = {name for name, module in MODULES.items() if module.why is None}
PACKAGES = {name.rpartition(".")[0] for name in SERVED} - {""}


def file_of(name: str) -> Path:
    folder = PATH.joinpath(*name.split("."))
    return folder / "__init__.py" if name in PACKAGES else folder.with_suffix(".py")


def files() -> dict[Path, str]:
    """The package, written from the table."""
    return {file_of(name): TEXT.format(name=name) + END.get(name, "") for name in SERVED}


# What `python -m` finds.
_MAIN = '\nif __name__ == "__main__":\n    __getattr__("main")()\n'
END = {"deepspeed.launcher.launch": _MAIN, "deepspeed.launcher.runner": _MAIN}


def test_each_module_of_the_table_has_its_file_and_there_is_no_other() -> None:
    """To write them: python tests/drop_in/test_names.py"""
    there = {path: path.read_text() for path in PATH.rglob("*.py")}
    assert there == files()


def test_every_package_of_the_table_is_in_it() -> None:
    assert PACKAGES <= SERVED


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_name_that_is_served_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = MODULES[name]
    if module.why is not None:
        assert module.topic in TOPICS
        return
    for row in module.rows:
        assert row.fate in (Fate.WORKS, Fate.MAPPED) or row.topic in TOPICS
        for theirs in row.names if row.fate != Fate.REFUSED else ():
            home, attribute = row.home_of(theirs)
            found = importlib.import_module(home)
            assert not attribute or hasattr(found, attribute), f"{name}.{theirs} -> {home}:{attribute}"


def deepspeed_names(file: Path, *, is_package: bool) -> set[str]:
    """What a module of DeepSpeed's defines, and what a package passes on: read and not run."""

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
            elif isinstance(node, ast.ImportFrom) and is_package and node.level:
                yield from (alias.asname or alias.name for alias in node.names if alias.name != "*")

    return {
        name for name in names(ast.parse(file.read_text(encoding="utf-8")).body) if not name.startswith("_")
    }


def deepspeed_file(name: str) -> Path | None:
    place = DEEPSPEED.parent.joinpath(*name.split("."))
    files = (place / "__init__.py", place.with_suffix(".py"))
    return next((file for file in files if file.is_file()), None)


@pytest.mark.skipif(not DEEPSPEED.is_dir(), reason="DeepSpeed is not there to compare with")
@pytest.mark.parametrize("name", sorted(SERVED))
def test_the_table_has_every_public_name_of_deepspeed_s_module(name: str) -> None:
    file = deepspeed_file(name)
    if file is None:
        assert name in NEW, f"{name} is no module of DeepSpeed's"
        return
    known = {one for row in MODULES[name].rows for one in row.names}
    below = {one.removeprefix(f"{name}.").split(".")[0] for one in MODULES if one.startswith(f"{name}.")}
    public = deepspeed_names(file, is_package=file.name == "__init__.py")
    assert sorted(public - known - below - NOISE) == []


@pytest.mark.skipif(not DEEPSPEED.is_dir(), reason="DeepSpeed is not there to compare with")
def test_every_module_of_deepspeed_s_has_a_row_or_lies_below_one_that_is_absent() -> None:
    missing = []
    for file in DEEPSPEED.rglob("*.py"):
        parts = file.relative_to(DEEPSPEED.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        above = [".".join(parts[:number]) for number in range(1, len(parts) + 1)]
        if name not in MODULES and not any(one in MODULES and MODULES[one].why for one in above):
            missing.append(name)
    assert sorted(missing) == []


if __name__ == "__main__":
    shutil.rmtree(PATH / "deepspeed")  # a folder that is left, if only with caches, could be imported
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sys.exit(0)
