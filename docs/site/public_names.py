"""Every public name of dslaunch, with its kind, its first sentence and where its source is."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import dslaunch

OF_THE_PACKAGE = ("checkpointing", "comm", "moe", "ops", "profiling", "sequence", "tensor", "utils", "zero")
BELOW = {"ops": ("adagrad", "adam", "lamb", "lion"), "utils": ("zero_to_fp32", "zero_to_torch")}
FIRST = ("Engine", "initialize")  # where every program begins
ORDER = ("function", "class", "module", "value")  # of a module's names, each kind in alphabetical order
VALUES = {
    ("dslaunch", "__version__"): "The version, as text.",
    ("dslaunch.utils", "logger"): "The logger `dslaunch` of the module `logging`, to which all messages go.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One public name.

    `source` is where it is defined, for mkdocstrings; None for values and modules, and for what is torch's.
    """

    name: str
    kind: str  # class, function, module or value
    summary: str  # the docstring's first sentence, empty if there is none
    source: str | None


def entries_by_module() -> dict[str, tuple[Entry, ...]]:
    """The public modules by the names that programs use, each with its public names in the order of ORDER."""
    modules: dict[str, ModuleType] = {"dslaunch": dslaunch}
    for name in OF_THE_PACKAGE:
        modules[f"dslaunch.{name}"] = getattr(dslaunch, name)
        for below in BELOW.get(name, ()):
            modules[f"dslaunch.{name}.{below}"] = import_module(f"dslaunch.{name}.{below}")
    return {name: tuple(entries_of(name, module)) for name, module in modules.items()}


def entries_of(module_name: str, module: ModuleType) -> list[Entry]:
    entries = [entry_of(module_name, name, getattr(module, name)) for name in public_names(module)]
    return sorted(entries, key=lambda entry: (entry.name not in FIRST, ORDER.index(entry.kind), entry.name))


def public_names(module: ModuleType) -> list[str]:
    """What `__all__` says; without it, what the module itself defines, and what it passes on from torch."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return sorted(listed)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and (value.__module__ == module.__name__ or is_passed_on(module, value))
    )


_PASSED_ON = (
    "torch.distributed",
    "dslaunch.runtime.comm.comms_log",
    "dslaunch.runtime.compat.init_distributed",
)


def is_passed_on(module: ModuleType, value: Any) -> bool:
    """Whether `dslaunch.comm` has this from elsewhere: functions, and what they are called with."""
    return module.__name__.endswith(".comm") and str(value.__module__).startswith(_PASSED_ON)


def entry_of(module_name: str, name: str, value: Any) -> Entry:
    if inspect.ismodule(value):
        kind = "module"
    elif inspect.isclass(value):
        kind = "class"
    else:
        kind = "function" if callable(value) else "value"
    said = VALUES.get((module_name, name)) if kind == "value" else inspect.getdoc(value)
    own = kind in ("class", "function") and value.__module__.startswith("dslaunch.")
    return Entry(
        name=name,
        kind=kind,
        summary=first_sentence(said or ""),
        source=f"{value.__module__}.{value.__qualname__}" if own else None,
    )


def first_sentence(text: str) -> str:
    """The first paragraph up to the first full stop that ends a sentence, on one line."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    sentence, stop, _ = paragraph.partition(". ")
    return sentence + (stop.strip() or "")
