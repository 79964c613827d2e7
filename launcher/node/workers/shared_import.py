"""Imports of a script that its workers may share: import once here and fork the workers from there, or not.

[Note: When it is safe]
Before the script imports torch it must have done nothing that the import could see. Above that line only
imports of the standard library, constants and definitions of functions may stand. A script that sets a
variable, has another module imported first or decides by `if` what to import is started without sharing. So
is a script in a job whose environment has Python do more at its start (coverage, a `sitecustomize` on
PYTHONPATH, which could ask for the rank), and so are workers on a host with GPUs: a fork before CUDA is
initialized does no harm, but no test of ours has seen that yet.

[Note: What is shared when a job starts again]
Then one worker on a host is reason enough, a GPU is no reason against it (a process that has opened one is
given up), and it is not torch alone: it is all that the script imports at its top, line by line, as far as
the rule above goes and as it is installed there (see preload_server.py). The modules that belong to the
script are not imported: they may have changed by then. Neither is a package whose import asks for a variable
that only a worker has, or starts threads, nor what comes after it.
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
_OURS = frozenset({"dslaunch", "deepspeed"})
# Packages that take their time, as they import torch
_WORTH_IT = frozenset(
    {"torch", "transformers", "accelerate", "peft", "trl", "lightning", "pytorch_lightning", *_OURS}
)
RESTART_IMPORTS = "dslaunch.runtime.engine.restart_imports"
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
    why_more = _why_more_is_run_at_start(env)
    if why_more:
        return SharedImport([], why_more)
    why_not = _what_stands_before(source, os.path.dirname(os.path.realpath(script)))
    return SharedImport([SHARED]) if why_not is None else SharedImport([], why_not)


def imports_at_top(script: str | None, *, env: dict[bytes, bytes]) -> list[list[str]]:
    """Return the lines that later attempts may share: each a module and the names taken from it. Empty if
    they share nothing. See [Note: What is shared when a job starts again].
    """
    source = source_of(script) if script is not None else b""
    if not any(name.encode() in source for name in _WORTH_IT) or _why_more_is_run_at_start(env):
        return []
    try:
        tree = compile(source, "script", "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []
    folder = os.path.dirname(os.path.realpath(script or ""))
    lines: list[list[str]] = []
    for statement in tree.body:  # type: ignore[attr-defined] # a Module, in this mode
        names = _imported(statement)
        if any(name == "." or _is_local(name, folder) for name in names):
            break
        if names:
            lines += _lines_of(statement)
        elif not _does_nothing(statement):
            break
    # A worker imports the standard library in no time, and torch imports numpy
    known = _standard_library()
    lines = [line for line in lines if line[0].partition(".")[0] not in known and line != ["numpy"]]
    tops = {line[0].partition(".")[0] for line in lines}
    for name in sorted(tops & _OURS):
        lines += [[name, "initialize"], [RESTART_IMPORTS]]  # what is else loaded when it is first used
    return lines if tops & _WORTH_IT else []


def _lines_of(statement: _ast.stmt) -> list[list[str]]:
    if isinstance(statement, _ast.Import):
        return [[one.name] for one in statement.names]
    if isinstance(statement, _ast.ImportFrom) and statement.module:
        return [[statement.module, *(one.name for one in statement.names)]]
    return []


def _why_more_is_run_at_start(env: dict[bytes, bytes]) -> str:
    for name in _AT_START:
        if name in env:
            return f"{name.decode()} is set"
    for folder in env.get(b"PYTHONPATH", b"").split(b":"):
        for module in _RUN_AT_START:
            if folder and _is_local(module, os.fsdecode(folder)):
                return f"PYTHONPATH has a {module}, which Python runs at its start"
    return ""


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
