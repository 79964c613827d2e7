"""The ds_config that a program's arguments name, as an engine reads it: JSON, HJSON, YAML, or base64 of JSON.

Plain JSON is read here; all else by the runtime's own reader, in a process of its own, since it takes
packages that the launcher does not load.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..inputs.named_file import read_named

_MODULE = f"{__package__.partition('.')[0]}.runtime.plan.config_file"
_YAML = (".yaml", ".yml")
_MAX_BYTES = 16 << 20
_BASE64 = re.compile("[A-Za-z0-9+/_=-]{16,}")


class _OtherForm(ValueError):
    """The text is not plain JSON with each key once."""


def read_ds_config(word: str, cwd: str) -> dict[str, Any]:
    """Return the ds_config that a program in the folder `cwd` is given by this word.

    Errors: LaunchError if it cannot be read, or is not one object
    """
    path = Path(cwd, word)
    if _BASE64.fullmatch(word) and not os.path.exists(path):
        return _as_engines_read(word, cwd)
    try:
        data = read_named(path, max_bytes=_MAX_BYTES)
    except OSError as error:
        raise LaunchError(
            f"--deepspeed_config {word}: it cannot be read ({error.strerror}); give a file that can"
        ) from None
    try:
        found = json.loads(data, object_pairs_hook=_object, parse_constant=_refuse)
    except (ValueError, RecursionError):  # the engine's reader says what is wrong, if something is
        found = None
    is_plain = isinstance(found, dict) and not word.lower().endswith(_YAML)
    return found if is_plain else _as_engines_read(word, cwd)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise _OtherForm
    return dict(pairs)


def _refuse(word: str) -> None:
    raise _OtherForm(word)


def _as_engines_read(word: str, cwd: str) -> dict[str, Any]:
    safe = ["-P"] if sys.version_info >= (3, 11) else []  # the folder of the job may have a torch.py
    ended = subprocess.run(
        [sys.executable, *safe, "-m", _MODULE, word],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if ended.returncode == 0:
        config: dict[str, Any] = json.loads(ended.stdout)
        return config
    why = ended.stderr.decode("utf-8", "replace").strip().splitlines()
    raise LaunchError(
        why[-1] if why else f"--deepspeed_config {word}: it cannot be read (no reason is known); report it"
    )
