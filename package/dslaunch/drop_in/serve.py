"""Common part of the modules of the package `deepspeed`: each hands out the names that
the table has for it.

Only `deepspeed` itself is a file. Its modules, all of DeepSpeed's, are made when they are imported, by a
finder that Python asks last. A module that DeepSpeed has and we have not can be imported and raises when it
is used (stand_in.py); `hasattr()` and `getattr()` say that a name is not there, so that a program that asks
first takes its other way.

Modules that few programs need are imported in the functions that need them: each start of a program counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from .names import MODULES
from .names.table import SAME, Module, NameFate, NameRow

PAGE = "docs/reference/compatibility.md"
_CALLS = ("CALL", "CALL_FUNCTION", "CALL_METHOD", "PRECALL")


def serve(name: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for the module of this name, which module_of() has."""
    module = module_of(name)
    if module is None:
        raise AssertionError(f"{name} is no module of DeepSpeed's")
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.append(_Finder())

    def find(wanted: str) -> Any:
        if wanted == "__all__" and not _is_empty(module):
            return module.names
        home, there = _home(module, wanted)
        row = home.row_of(there)
        if row is None or row.fate == NameFate.REFUSED:
            return _below_or_absent(home, there, row, _instruction(sys._getframe(1)))
        value = _value(row, there)
        if name in sys.modules:  # absent if the module was started by `python -m`
            sys.modules[name].__dict__[wanted] = value
        return value

    return find, lambda: sorted({*module.names, *_submodules(name), *vars(sys.modules.get(name, object))})


@cache
def module_of(name: str) -> Module | None:
    """Return the entry of a module of DeepSpeed's, or of the package above it;
    None if DeepSpeed has no such module.
    """
    module = MODULES.get(name)
    if module is not None:
        return module
    folder, _, last = name.rpartition(".")
    if last not in _folders().get(folder, "").split():
        return None
    above = module_of(folder)
    if above is None or above.why is None:
        raise AssertionError(f"the table has nothing for {name}")
    return Module(name, why=above.why, topic=above.topic)


class _Finder:
    """The last to be asked for a module, when no other has found it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("deepspeed.") or module_of(name) is None:
            return None
        is_package = name in _folders() or any(one.startswith(f"{name}.") for one in MODULES)
        return ModuleSpec(name, _Loader(), is_package=is_package)  # type: ignore[arg-type]  # importlib.abc costs 10 ms


class _Loader:
    """Makes a module of DeepSpeed's. `python -m` of one calls its main()."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module."""

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__, module.__dir__ = serve(module.__name__)  # type: ignore[method-assign]
        module.__doc__ = f"`{module.__name__}` of dslaunch: see {PAGE}"

    def get_code(self, name: str) -> CodeType:
        return compile(f"from {name} import main\nmain()\n", f"<{name}>", "exec")


def _folders() -> dict[str, str]:
    from .names.modules import FOLDERS

    return FOLDERS


def _home(module: Module, wanted: str) -> tuple[Module, str]:
    """Return the module that has the name, and its name there: another one if DeepSpeed's module
    passes the name on.
    """
    if module.why is not None or module.row_of(wanted) is not None or wanted.startswith("_"):
        return module, wanted
    from .names.passed_on import PASSED_ON

    for home, words in PASSED_ON.get(module.name, {}).items():
        for word in words.split():
            here, _, there = word.partition("=")
            origin = module_of(home) if here == wanted else None
            if origin is not None:
                return _home(origin, there or here)
    return module, wanted


def _value(row: NameRow, wanted: str) -> Any:
    home, attribute = row.home_of(wanted)
    return getattr(import_module(home), attribute) if attribute else import_module(home)


def _is_empty(module: Module) -> bool:
    return module.why is not None and not module.rows


def _submodules(name: str) -> list[str]:
    inner = (one.removeprefix(f"{name}.") for one, module in MODULES.items() if not _is_empty(module))
    return [one for one in inner if one != name and "." not in one]


def _instruction(frame: Any) -> str:
    """Return what asks for a name: a call, of hasattr() or getattr(), or `module.name`, or
    `from module import name`.
    """
    from opcode import opname

    return str(opname[frame.f_code.co_code[frame.f_lasti]])


def _below_or_absent(module: Module, wanted: str, row: NameRow | None, instruction: str) -> Any:
    """Return a module that lies in this one, or what stands in for a name that is not here.

    Errors: AttributeError if it is not here and only asked for, or if DeepSpeed has no such name either
    """
    what = f"{module.name}.{wanted}"
    is_asked = instruction in _CALLS
    place = f"{SAME.get(module.name, module.name)}.{wanted}"
    below = module_of(place)
    if below is not None and not (_is_empty(below) and is_asked):
        return import_module(place)
    topic, why = (row.topic, row.note) if row is not None else (module.topic, module.why)
    if why is None or wanted.startswith("__"):
        text = (
            f"module {module.name!r} of dslaunch has no attribute {wanted!r}; DeepSpeed's names "
            f"are listed in {PAGE}"
        )
    else:
        text = f'{what} is not in dslaunch: {why}; see "{topic}" in {PAGE}'
        if not is_asked:
            from .stand_in import stand_in

            return stand_in(module.name, wanted, text)
    if instruction == "IMPORT_FROM":
        raise ImportError(text, name=module.name)  # Python would put an AttributeError's text away
    raise AttributeError(text, name=wanted)
