"""What a script imports that its workers may share: whether to import it once here and fork them from there.

Sent to the nodes: standard library only.

[Note: When it is safe]
Before the script imports torch it must have done nothing that the import could see: above that line stand
imports of the standard library, constants, and functions that are defined. A script that sets a variable, has
another module imported first or decides by `if` what to import is started as ever. So is one in a job whose
environment has Python do more at its start (coverage, a `sitecustomize` on PYTHONPATH, which could ask for
the rank), and so are workers on a host with GPUs: a fork before
CUDA is initialized does no harm, but no test of ours has seen that yet.
"""

from __future__ import annotations

import _ast
import os
import sys

from ..system.lean_stdlib import suppress

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from ...wire.fast_tuple import Record as NamedTuple

MAX_BYTES = 1 << 20  # of a script that is looked at
SHARED = "torch"
_MENTIONS = b"torch"
# Packages whose import is one of torch before it is anything else. Their own part stays with each worker.
_LIKE_TORCH = ("torch", "dslaunch")
_HARMLESS = ("numpy",)  # it may stand above: torch imports it too
_AT_START = (b"COVERAGE_PROCESS_START", b"COVERAGE_PROCESS_CONFIG")
_RUN_AT_START = ("sitecustomize", "usercustomize")


class SharedImport(NamedTuple):
    """`modules` to import once; without any, `why_not` is the reason, or empty if there was no question."""

    modules: list[str]
    why_not: str = ""


def shared_import(
    script: str | None, *, num_workers: int, num_devices: int, env: dict[bytes, bytes]
) -> SharedImport:
    """What the workers of one host are to share. `script` is None for a module or a program."""
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
    """The beginning of a script of Python's; empty for what is none."""
    with suppress(OSError):
        if script.endswith(".py") and os.path.isfile(script):
            with open(script, "rb", 0) as file:
                return file.read(MAX_BYTES)
    return b""


def _what_stands_before(source: bytes, folder: str) -> str | None:
    """None if nothing does that matters; empty if torch is not imported at the top of the script."""
    try:
        tree = compile(source, "script", "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ""  # each worker will say so
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
    """The names of top-level packages; `.` for the script's own."""
    if isinstance(statement, _ast.Import):
        return [one.name.partition(".")[0] for one in statement.names]
    if isinstance(statement, _ast.ImportFrom):
        return ["." if statement.level or not statement.module else statement.module.partition(".")[0]]
    return []


def _does_nothing(statement: _ast.stmt) -> bool:
    """A docstring, a name for a constant, or a function that has to be called first."""
    if isinstance(statement, (_ast.Expr, _ast.Assign)):
        names = statement.targets if isinstance(statement, _ast.Assign) else []
        return isinstance(statement.value, _ast.Constant) and all(isinstance(one, _ast.Name) for one in names)
    if isinstance(statement, _ast.FunctionDef):
        given = [*statement.args.defaults, *filter(None, statement.args.kw_defaults)]
        return not statement.decorator_list and all(isinstance(one, _ast.Constant) for one in given)
    return False


def _is_local(name: str, folder: str) -> bool:
    """Whether a file of the script's folder has the name of the package, and is found before it."""
    place = os.path.join(folder, name)
    return os.path.exists(place + ".py") or os.path.isdir(place)


def _standard_library() -> frozenset[str]:
    """Empty before Python 3.10: then nothing is known to be of it."""
    return getattr(sys, "stdlib_module_names", frozenset())
