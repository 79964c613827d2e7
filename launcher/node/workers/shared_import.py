"""Imports of a script that its workers may share: import once here and fork the workers from there, or not.

[Note: When it is safe]
Before the script imports torch it must have done nothing that the import could see. Above that line only
imports of the standard library, constants and definitions of functions may stand. A script that sets a
variable, has another module imported first or decides by `if` what to import is started without sharing. So
is a script in a job whose environment has Python do more at its start (coverage, a `sitecustomize` on
PYTHONPATH, which could ask for the rank), and so are workers on a host with GPUs: a fork before CUDA is
initialized does no harm, but no test of ours has seen that yet.
"""

from __future__ import annotations

import _ast
import os
import sys

from ..system.lean_stdlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from ...wire.fast_tuple import Record as NamedTuple

MAX_BYTES = 1 << 20  # bytes of a script that are looked at
SHARED = "torch"
_MENTIONS = b"torch"
# Packages whose import begins with the import of torch. Their other modules are imported in each worker.
_LIKE_TORCH = ("torch", "dslaunch")
_HARMLESS = ("numpy",)  # may stand above: torch imports it too
_AT_START = (b"COVERAGE_PROCESS_START", b"COVERAGE_PROCESS_CONFIG")
_RUN_AT_START = ("sitecustomize", "usercustomize")


class SharedImport(NamedTuple):
    """`modules` to import once; if empty, `why_not` is the reason, or empty if no reason is needed."""

    modules: list[str]
    why_not: str = ""


def shared_import(
    script: str | None, *, num_workers: int, num_devices: int, env: dict[bytes, bytes]
) -> SharedImport:
    """Decide which imports the workers of one host share. `script` is None for a module or a program."""
    if num_workers < 2 or script is None:
        return SharedImport([])
    source = source_of(script)
    if _MENTIONS not in source and b"dslaunch" not in source:
        return SharedImport([])
    if num_devices:
        return SharedImport([], "this host has GPUs")
    for name in _AT_START:
        if name in env:
            return SharedImport([], f"{name.decode()} is set")
    for folder in env.get(b"PYTHONPATH", b"").split(b":"):
        for module in _RUN_AT_START:
            if folder and _is_local(module, os.fsdecode(folder)):
                return SharedImport([], f"PYTHONPATH has a {module}, which Python runs at its start")
    why_not = _what_stands_before(source, os.path.dirname(os.path.realpath(script)))
    return SharedImport([SHARED]) if why_not is None else SharedImport([], why_not)


def source_of(script: str) -> bytes:
    """Return the beginning of a Python script; empty for any other file."""
    with suppress(OSError):
        if script.endswith(".py") and os.path.isfile(script):
            with open(script, "rb", 0) as file:
                return file.read(MAX_BYTES)
    return b""


def _what_stands_before(source: bytes, folder: str) -> str | None:
    """Name the first line before the import of torch that matters; None if no line does, empty if torch is
    not imported at the top of the script.
    """
    try:
        tree = compile(source, "script", "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ""  # each worker will report the error
    for statement in tree.body:  # type: ignore[attr-defined] # a Module, in this mode
        for name in _imported(statement):
            if name in _LIKE_TORCH and not _is_local(name, folder):
                return None
            if name not in _HARMLESS and (name not in _standard_library() or _is_local(name, folder)):
                return f"line {statement.lineno} imports {name} before torch"
        if not _is_import(statement) and not _does_nothing(statement):
            return f"line {statement.lineno} is run before torch is imported"
    return ""


def _is_import(statement: _ast.stmt) -> bool:
    return isinstance(statement, (_ast.Import, _ast.ImportFrom))


def _imported(statement: _ast.stmt) -> list[str]:
    """Names of the imported top-level packages; `.` for the script's own."""
    if isinstance(statement, _ast.Import):
        return [one.name.partition(".")[0] for one in statement.names]
    if isinstance(statement, _ast.ImportFrom):
        return ["." if statement.level or not statement.module else statement.module.partition(".")[0]]
    return []


def _does_nothing(statement: _ast.stmt) -> bool:
    """Tell whether it is a docstring, a named constant, or a function that has to be called first."""
    if isinstance(statement, (_ast.Expr, _ast.Assign)):
        names = statement.targets if isinstance(statement, _ast.Assign) else []
        return isinstance(statement.value, _ast.Constant) and all(isinstance(one, _ast.Name) for one in names)
    if isinstance(statement, _ast.FunctionDef):
        given = [*statement.args.defaults, *filter(None, statement.args.kw_defaults)]
        return not statement.decorator_list and all(isinstance(one, _ast.Constant) for one in given)
    return False


def _is_local(name: str, folder: str) -> bool:
    """Tell whether a file of the script's folder has the name of the package: Python finds it first."""
    place = os.path.join(folder, name)
    return os.path.exists(place + ".py") or os.path.isdir(place)


def _standard_library() -> frozenset[str]:
    """Names of the standard library's modules; empty before Python 3.10, which does not list them."""
    return getattr(sys, "stdlib_module_names", frozenset())
