"""Where a config comes from: a file, a dict, or a base64 text; all become plain dicts and lists."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from typing import Any

import hjson

from ..errors import ConfigError
from .value import show_name

_DICT_NAME = "ds_config"
_BASE64_NAME = "ds_config (base64)"
_STANDARD = str.maketrans(
    "-_", "+/"
)  # from the alphabet that is safe in URLs, which DeepSpeed's launcher writes


class _TwiceGiven:
    """Stands in for the value of a key that an object has more than once."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        values[name] = _TwiceGiven() if name in values else value
    return values


def _find(values: Any, wanted: type, path: str = "") -> list[str]:
    """The dotted paths where a value of type `wanted` stands."""
    if isinstance(values, wanted):
        return [path]
    if isinstance(values, dict):
        return [
            hit for name, value in values.items() for hit in _find(value, wanted, f"{path}.{show_name(name)}")
        ]
    if isinstance(values, list):
        return [hit for index, value in enumerate(values) for hit in _find(value, wanted, f"{path}[{index}]")]
    return []


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        values = hjson.loads(text, object_pairs_hook=_object)
    except hjson.HjsonDecodeError as error:
        where = f"{source}:{error.lineno}" if error.lineno else source
        raise ConfigError(
            f"{where}: {' '.join(error.msg.split())}; the file must be one JSON object"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{source}: objects or lists stand too deep inside each other") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: a config must be one object: {{ ... }}")
    if twice := _find(values, _TwiceGiven):
        names = ", ".join(path.lstrip(".") for path in twice)
        raise ConfigError(f"{source}: {names}: given more than once; keep one")
    return values


def _read_file(path: str) -> dict[str, Any]:
    source = show_name(path)
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: not a text in UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from error
    return _parse(text, source)


def _read_base64(text: str) -> dict[str, Any]:
    try:
        decoded = base64.b64decode(text.translate(_STANDARD), validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        decoded = ""
    if not decoded.lstrip().startswith("{"):
        shown = text if len(text) <= 200 else f"{text[:200]}..."
        raise ConfigError(
            f"{show_name(shown)}: no such file; give the path of a ds_config, a dict, or base64 of a JSON object"
        )
    return _parse(decoded, _BASE64_NAME)


def _plain(value: Any) -> Any:
    """`value` with dicts for mappings and lists for tuples, so that the caller's objects are never shared."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def _not_text(value: Any) -> object | None:
    """A key that is no text, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                return repr(name)
            if (found := _not_text(inner)) is not None:
                return found
    if isinstance(value, list):
        return next((found for inner in value if (found := _not_text(inner)) is not None), None)
    return None


def read_source(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of `source` for messages, and what it says as dicts, lists and scalars.

    Errors: ConfigError if it cannot be read, is not one object, or has a key twice or one that is no text.
    """
    if isinstance(source, Mapping):
        try:
            values = _plain(source)
        except RecursionError as error:
            raise ConfigError(f"{_DICT_NAME}: objects or lists stand too deep inside each other") from error
        if (key := _not_text(values)) is not None:
            raise ConfigError(f"{_DICT_NAME}: the key {key} is not a text")
        return _DICT_NAME, values
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            f"a config of type {type(source).__name__}: must be a path, a dict, or a base64 text"
        )
    path = os.fspath(source)
    if isinstance(source, os.PathLike) or os.path.exists(path):
        return show_name(path), _read_file(path)
    return _BASE64_NAME, _read_base64(path)
