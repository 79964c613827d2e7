"""The variables that a job's workers get: some variables of the launching shell, then those of the
`.deepspeed_env` files.

[Note: The format of an environment file]
One variable per line, `NAME=value` or `export NAME=value`. Blank lines and lines that begin with `#` are
skipped; a `#` further right belongs to the value. Three ways to write a value are in use, told apart by
its first character:

    raw           goes to the end of its line, without the white space around it. Quotes, `;`, `(`, `#`,
                  backquotes and backslashes stay as they are, except that `\\$` is a dollar sign. `$NAME`
                  and `${NAME}` expand.
    "..." '...'   a value made of nothing but quoted pieces, as `shlex.quote` writes it, loses its quotes as
                  in a shell: nothing expands in single quotes; in double quotes `$NAME` and `${NAME}` do, and
                  a backslash protects `"`, `\\`, `$` and the backquote. Such a value may contain line ends.
    "a" b         a value that only begins with a quoted piece is raw.

A command is never run: `$(...)` and backquotes are text like any other.

[Note: Order of the entries]
Entries stay in order, also those of one name: the node applies them one after the other, so a later one wins
and may refer to an earlier one (`PATH=/opt/bin:$PATH`). Variables without an entry come from the node's own
environment, and those unset there are empty. `expand` is the definition.

All text is UTF-8 decoded with surrogateescape, as in os.environ: every byte but NUL survives.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import LaunchError
from .named_file import read_named

DEFAULT_FILE_NAME = ".deepspeed_env"
FILE_NAME_VARIABLE = "DS_ENV_FILE"
SHELL = "the shell"
# The source of PYTHONPATH; if the shell has one, too, the source reads "the working folder, then the shell".
WORKING_FOLDER = "the working folder"

# A variable of the launching shell whose name starts with one of these goes to every node: communication,
# Python and experiment tracking, then the names that Nebula and Azure ML jobs read.
# Source: DeepSpeed 0.19.6 launcher/runner.py, `EXPORT_ENVS`; nebula/constants.py,
#         `NEBULA_EXPORT_ENVS`. DeepSpeed
# drops two names when AISC_JOB_NAME is set; here nothing is dropped.
EXPORTED_PREFIXES = (
    "MLFLOW",
    "MV2",
    "NCCL",
    "PYTHON",
    "UCX",
    "AML_RUN_ID",
    "AZUREML_BLOB_ACCOUNT_KEY",
    "AZUREML_BLOB_ACCOUNT_NAME",
    "AZUREML_EXPERIMENT_SCOPE",
    "AZUREML_PARAMETER_ITPJOB_NAME",
    "AZUREML_RUN_HISTORY_SERVICE_ENDPOINT",
    "AZUREML_RUN_ID",
    "AZUREML_RUN_TOKEN",
    "AZUREML_WORKSPACE_SCOPE",
    "DLTS_JOB_ID",
    "DLTS_NUM_WORKER",
    "FC_TASKROLE_NAME",
    "FC_TASK_INDEX",
    "LOCAL_HOST",
    "MASTER_HOST",
    "NEBULA_MEMORY_BUFFER_SIZE",
    "NEBULA_PERSISTENT_STORAGE_PATH",
    "NEBULA_PERSISTENT_TIME_INTERVAL",
    "DSLAUNCH_DROP_IN",
    "DSLAUNCH_LOG_LEVEL",
)

SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSW", "CREDENTIAL")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXPORT = re.compile(r"^export[ \t]+")
_BLANK = " \t\r"  # white space that is removed around a name or a value; any other belongs to the text
_KEY_SHOWN_LENGTH = 40

_SINGLE_QUOTED = re.compile(r"'([^']*)'")
_DOUBLE_QUOTED = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)
_VARIABLE = rf"\$(?:({_NAME.pattern})|\{{({_NAME.pattern})\}}|(\{{))"
_TOKEN_IN_DOUBLE_QUOTES = re.compile(r'\\(["\\$`])|' + _VARIABLE)
_TOKEN_IN_RAW = re.compile(r"\\(\$)|" + _VARIABLE)


class EnvEntry(NamedTuple):
    """One assignment, to be made on each node. See [Note: Order of the entries]."""

    name: str
    value: tuple[str, ...]  # literal, variable name, literal, ...: odd places are expanded on the node
    source: str  # "the shell", "the working folder" or "/home/ada/.deepspeed_env:3"


def exported(
    environ: Mapping[str, str], *, cwd: str, home: Path, file_name: str | None
) -> tuple[EnvEntry, ...]:
    """Return the launching side's entries for every worker's environment, in the order in which they are
    applied.

    First come the shell's variables that EXPORTED_PREFIXES selects, by name, with `cwd` in front of
    PYTHONPATH; then the file in `home`, then the one in `cwd`, so the latter wins. `file_name` replaces
    `.deepspeed_env`, as a path from each of the two folders; a file to which both paths lead is read once.
    Errors: LaunchError if `file_name` is given and found in neither folder, if a file cannot be read, or as
    parse_env_file(). A missing `.deepspeed_env` is fine.
    """
    taken = {name: (value, SHELL) for name, value in environ.items() if name.startswith(EXPORTED_PREFIXES)}
    of_shell = environ.get("PYTHONPATH")
    ours = (f"{cwd}:{of_shell}", f"{WORKING_FOLDER}, then {SHELL}") if of_shell else (cwd, WORKING_FOLDER)
    taken["PYTHONPATH"] = ours
    entries = [EnvEntry(name=name, value=(taken[name][0],), source=taken[name][1]) for name in sorted(taken)]
    found = False
    for path in {os.path.realpath(path): path for path in _paths(cwd, home, file_name)}.values():
        data = _read(path)
        if data is not None:
            found = True
            entries += parse_env_file(data, source=str(path))
    if file_name and not found:
        paths = " or ".join(dict.fromkeys(str(path) for path in _paths(cwd, home, file_name)))
        raise LaunchError(
            f"{FILE_NAME_VARIABLE}={file_name!r}: there is no {paths}; "
            f"create the file, or unset {FILE_NAME_VARIABLE} to read {DEFAULT_FILE_NAME}"
        )
    return tuple(entries)


def parse_env_file(data: bytes, *, source: str) -> tuple[EnvEntry, ...]:
    """Return the assignments of an environment file, in its order. See [Note: The format of an environment
    file].

    Errors: LaunchError with `source` and the line's number. No message shows a value: values may be secrets.
    """
    text = data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    if "\0" in text:
        number = text.count("\n", 0, text.index("\0")) + 1
        raise LaunchError(f"{source}:{number}: a NUL byte; a variable holds any byte but NUL; remove it")
    entries: list[EnvEntry] = []
    start, number = 0, 1
    while start < len(text):
        line = text[start : _line_end(text, start)]
        if line.strip(_BLANK) and not line.lstrip(_BLANK).startswith("#"):
            where = f"{source}:{number}"
            name = _parse_name(line, where)
            value, end = _parse_value(text, start + line.index("=") + 1, name, where)
            entries.append(EnvEntry(name=name, value=tuple(value), source=where))
        else:
            end = start + len(line)
        number += text.count("\n", start, end + 1)
        start = end + 1
    return tuple(entries)


def value_parts(text: str, *, name: str, where: str) -> tuple[str, ...]:
    """Return the value of an EnvEntry for the text after the `=` of an environment file, on one line."""
    return tuple(_parse_value(text, 0, name, where)[0])


def raw_parts(text: str, *, name: str, where: str) -> tuple[str, ...]:
    """Return the value of an EnvEntry for text without quotes around it: `$NAME` expands, `\\$` does not."""
    return tuple(_split(text, _TOKEN_IN_RAW, name, where))


def expand(entries: Iterable[EnvEntry], base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that a node makes of `entries` and its own environment, `base`.

    See [Note: Order of the entries].
    """
    environ = dict(base)
    for entry in entries:
        environ[entry.name] = "".join(
            environ.get(part, "") if place % 2 else part for place, part in enumerate(entry.value)
        )
    return environ


def is_secret(name: str) -> bool:
    """Tell whether the value of a variable of this name should not be shown."""
    return any(word in name.upper() for word in SECRET_WORDS)


def _paths(cwd: str, home: Path, file_name: str | None) -> tuple[Path, Path]:
    name = file_name or DEFAULT_FILE_NAME
    return home / name, Path(cwd) / name


def _read(path: Path) -> bytes | None:
    try:
        return read_named(path)
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise LaunchError(
                f"{path}: this environment file is a link to {os.readlink(path)}, which is not there; repair "
                "the link, or remove it"
            ) from None
        return None
    except OSError as error:
        raise LaunchError(
            f"{path}: this environment file cannot be read ({error.strerror}); make it a "
            "readable file, or remove it"
        ) from error


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def _parse_name(line: str, where: str) -> str:
    key, equals, _ = line.partition("=")
    if not equals:
        raise LaunchError(f"{where}: a line without '='; allowed is NAME=value; write e.g. 'NCCL_DEBUG=INFO'")
    key = _EXPORT.sub("", key.strip(_BLANK))
    if _NAME.fullmatch(key):
        return key
    near = re.sub(r"[^A-Za-z0-9_]+", "_", key).strip("_")
    hint = f"; did you mean {near!r}?" if _NAME.fullmatch(near) else "; write e.g. 'NCCL_DEBUG=INFO'"
    shown = key if len(key) <= _KEY_SHOWN_LENGTH else key[:_KEY_SHOWN_LENGTH] + "..."
    raise LaunchError(
        f"{where}: {shown!r}: a variable's name holds letters, digits and '_', and does not "
        f"begin with a digit{hint}"
    )


def _parse_value(text: str, start: int, name: str, where: str) -> tuple[list[str], int]:
    """Return the value that begins at `start`, and the place of the line end after it."""
    line_end = _line_end(text, start)
    while start < line_end and text[start] in _BLANK:
        start += 1
    pieces: list[re.Match[str]] = []
    end = start
    while text.startswith(("'", '"'), end):
        piece = (_SINGLE_QUOTED if text[end] == "'" else _DOUBLE_QUOTED).match(text, end)
        if piece is None:
            raise LaunchError(
                f"{where}: {name}: the quote {text[end]} is opened and not closed; end the value with it, "
                f"or, if it is part of the value, write {name}={_quoted_quote(text[end])}"
            )
        pieces.append(piece)
        end = piece.end()
    value_end = _line_end(text, end)
    if pieces and not text[end:value_end].strip(_BLANK):
        value = [""]
        for piece in pieces:
            is_literal = piece.re is _SINGLE_QUOTED
            _append(
                value, [piece[1]] if is_literal else _split(piece[1], _TOKEN_IN_DOUBLE_QUOTES, name, where)
            )
        return value, value_end
    if end > line_end:
        raise LaunchError(
            f"{where}: {name}: text follows the quote that closes on a later line; a value of several lines "
            "is quoted to its end; move the text inside the quotes"
        )
    return _split(text[start:line_end].rstrip(_BLANK), _TOKEN_IN_RAW, name, where), line_end


def _split(text: str, token: re.Pattern[str], name: str, where: str) -> list[str]:
    """Split `text` into literals and, at the odd places, variable names; remove the backslashes that protect
    a sign.
    """
    value = [""]
    end = 0
    for match in token.finditer(text):
        protected, plain, braced, unfinished = match.groups()
        if unfinished:
            raise LaunchError(
                f"{where}: {name}: after '${{' only a variable's name and '}}' may follow; "
                "write e.g. '${HOME}', or '\\${' for the text itself"
            )
        value[-1] += text[end : match.start()] + (protected or "")
        if plain or braced:
            value += [plain or braced, ""]
        end = match.end()
    value[-1] += text[end:]
    return value


def _append(value: list[str], more: list[str]) -> None:
    value[-1] += more[0]
    value += more[1:]


def _quoted_quote(quote: str) -> str:
    return '"\'"' if quote == "'" else "'\"'"
