"""Sources of a config: a JSON, HJSON or YAML file, a dict, or a base64 text;
all become plain dicts and lists.

The scalars of YAML
-------------------
Unquoted words mean what JSON's words mean: numbers (1e-5 is one, as in YAML 1.2), true, false, null.
All other words are texts: YAML 1.1 guesses other values from yes, 010, 1:30 and 2026-01-01, which a ds_config
never means.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import hjson
import yaml

from ..errors import ConfigError
from .keys.value import show_name

_DICT_NAME = "ds_config"
_BASE64_NAME = "ds_config (base64)"
_YAML_SUFFIXES = (".yaml", ".yml")
# tags that no file writes out
_YAML_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_MAX_YAML_VALUES = 100_000  # aliases counted as often as they are used: a ds_config has a few hundred
_YAML_NUMBER = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_YAML_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None, ".inf": math.inf}
_STANDARD = str.maketrans("-_", "+/")  # the alphabet that is safe in URLs, which DeepSpeed's launcher writes


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


def _parse_json(text: str, source: str) -> Any:
    try:
        return hjson.loads(text, object_pairs_hook=_object)
    except hjson.HjsonDecodeError as error:
        where = f"{source}:{error.lineno}" if error.lineno else source
        raise ConfigError(f"{where}: {_why_not_json(error)}; the file must be one JSON object") from error


def _why_not_json(error: hjson.HjsonDecodeError) -> str:
    """Return hjson's error, with the character that its message leaves out; a control character stands before
    the place it tells.
    """
    before, here = error.doc[max(0, error.pos - 1) : error.pos], error.doc[error.pos : error.pos + 1]
    if "control character" in error.msg:
        escaped = json.dumps(before)[1:-1]
        return f"a text holds a control character as it is; write {escaped} in its place"
    return " ".join(error.msg.replace("%r", json.dumps(here)).split())


def _parse_yaml(text: str, source: str) -> Any:
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
        return None if node is None else _yaml_value(node, itertools.count(1))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        why = ", ".join(filter(None, [error.context, error.problem]))
        raise ConfigError(f"{where}: {why}; the file must be one YAML mapping") from error
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"{source}: {why}; the file must be one YAML mapping") from error


def _yaml_value(node: yaml.Node, counted: Iterator[int]) -> Any:
    """Return the value of a node. See "The scalars of YAML"; an alias is a copy, and `counted` counts all
    values.
    """
    if next(counted) > _MAX_YAML_VALUES:
        raise yaml.MarkedYAMLError(
            problem=(
                f"with its aliases written out it has more than {_MAX_YAML_VALUES} "
                "values; write fewer aliases"
            ),
            problem_mark=node.start_mark,
        )
    if node.tag not in _YAML_TAGS:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise yaml.MarkedYAMLError(problem=f"the tag {tag} is not read", problem_mark=node.start_mark)
    if isinstance(node, yaml.SequenceNode):
        return [_yaml_value(inner, counted) for inner in node.value]
    if isinstance(node, yaml.MappingNode):
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is not a word", problem_mark=key.start_mark)
        return _object([(key.value, _yaml_value(value, counted)) for key, value in node.value])
    word: str = node.value
    if isinstance(node, yaml.ScalarNode) and node.style is not None:  # quoted, or a block of text
        return word
    if word.lower() in _YAML_WORDS:
        return _YAML_WORDS[word.lower()]
    if _YAML_NUMBER.fullmatch(word):
        return float(word) if set(word) & set(".eE") else int(word)
    return word


def _parse(text: str, source: str, parse: Callable[[str, str], Any]) -> dict[str, Any]:
    try:
        values = parse(text, source)
        twice = _find(values, _TwiceGiven)
    except ConfigError:
        raise
    except RecursionError as error:
        raise ConfigError(f"{source}: objects or lists stand too deep inside each other") from error
    except (ValueError, OverflowError) as error:  # from int(): 5,000 digits, or JSON's 1e400
        raise ConfigError(f"{source}: a number is too large to be read") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: a config must be one object: {{ ... }}")
    if twice:
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
    return _parse(text, source, _parse_yaml if path.lower().endswith(_YAML_SUFFIXES) else _parse_json)


def _read_base64(text: str) -> dict[str, Any]:
    try:
        decoded = base64.b64decode(text.translate(_STANDARD), validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        decoded = ""
    if not decoded.lstrip().startswith("{"):
        shown = text if len(text) <= 200 else f"{text[:200]}..."
        raise ConfigError(
            f"{show_name(shown)}: no such file; give the path of a ds_config, a dict, or "
            "base64 of a JSON object"
        )
    return _parse(decoded, _BASE64_NAME, _parse_json)


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
            if (key := _not_text(inner)) is not None:
                return key
    if isinstance(value, list):
        return next((key for inner in value if (key := _not_text(inner)) is not None), None)
    return None


def read_source(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of `source` for messages, and its content as dicts, lists and scalars.

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
