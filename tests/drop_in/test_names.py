"""The table of names, the files of the package that serve it, and DeepSpeed itself agree."""

from __future__ import annotations

import importlib
import sys
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


if __name__ == "__main__":
    for path in PATH.rglob("*.py"):
        path.unlink()
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sys.exit(0)
