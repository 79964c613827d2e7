"""What the modules of the package `deepspeed` have in common: each hands out the names that the table has for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from .names import MODULES
from .names.table import Fate, Module, Row

PAGE = "docs/compatibility.md"


def serve(name: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for the module of this name, which the table has."""
    module = MODULES[name]
    if not any(isinstance(one, _Absent) for one in sys.meta_path):
        sys.meta_path.append(_Absent())

    def find(wanted: str) -> Any:
        if wanted == "__all__":
            return module.names
        row = module.row_of(wanted)
        if row is not None and row.fate != Fate.REFUSED:
            value = _value(row, wanted)
        elif f"{name}.{wanted}" in MODULES and MODULES[f"{name}.{wanted}"].why is None:
            return import_module(f"{name}.{wanted}")
        else:
            raise _absent(module, wanted, row)
        if name in sys.modules:  # not if it was started by `python -m`
            sys.modules[name].__dict__[wanted] = value
        return value

    return find, lambda: sorted({*module.names, *_submodules(name), *vars(sys.modules.get(name, object))})


class _Absent:
    """The last to be asked for a module, when no other has found it: says why there is none."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        module = MODULES.get(name)
        if module is not None and module.why is not None:
            raise ModuleNotFoundError(_text(module), name=name)


def _value(row: Row, wanted: str) -> Any:
    home, attribute = row.home_of(wanted)
    return getattr(import_module(home), attribute) if attribute else import_module(home)


def _submodules(name: str) -> list[str]:
    inner = (one.removeprefix(f"{name}.") for one, module in MODULES.items() if module.why is None)
    return [one for one in inner if one != name and "." not in one]


def _absent(module: Module, wanted: str, row: Row | None) -> Exception:
    """An ImportError for `from module import wanted`, which would put an AttributeError's text away, and else that."""
    what = f"{module.name}.{wanted}"
    below = MODULES.get(what)
    if row is not None:
        text = f"{what} is not in dslaunch: {_explained(row.topic, row.note)}"
    elif below is not None:
        text = _text(below)
    else:
        text = f"module {module.name!r} of dslaunch has no attribute {wanted!r}; DeepSpeed's names are listed in {PAGE}"
    if _is_from_import(sys._getframe(2)):
        return ImportError(text, name=module.name)
    return AttributeError(text, name=wanted)


def _is_from_import(frame: Any) -> bool:
    import dis  # here: only a mistake asks

    instruction = frame.f_code.co_code[frame.f_lasti]
    return bool(dis.opname[instruction] == "IMPORT_FROM")


def _text(module: Module) -> str:
    return f"{module.name} is not in dslaunch: {_explained(module.topic, module.why or '')}"


def _explained(topic: str, why: str) -> str:
    return f'{why}; see "{topic}" in {PAGE}'
