"""Values in quotes: `"enabled": "true"` and `"stage": "2"` mean what they say where a program was written for
DeepSpeed, whose sections read them so.

Source: pydantic 2, conversion of a text or number to bool, int and float in its lax mode
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, get_args

from .key_table import FIELDS, KEYS
from .keys.value import BOOL, COUNT, INT, NUMBER, POSITIVE, RATIO, SIZE, show, show_name
from .strict import Sifted

_WORDS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}
_NUMBERS = (INT, COUNT, POSITIVE, NUMBER, SIZE, RATIO)
_OLD = {"bf16": "bfloat16"}


def read_quoted(values: dict[str, Any], sifted: Sifted) -> dict[str, Any]:
    """Return `values` with quoted texts converted, by the kind of their key."""

    def read(inner: Mapping[str, Any], path: str) -> dict[str, Any]:
        return {name: one(value, f"{path}.{name}" if path else name) for name, value in inner.items()}

    def one(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return read(value, path)
        kind = _kinds().get(path)
        number: float | None = None
        if kind is bool and (isinstance(value, str) or (type(value) in (int, float) and value in (0, 1))):
            number = _WORDS.get(str(int(value) if not isinstance(value, str) else value).lower())
        elif (
            kind is float and isinstance(value, str) and "." in path
        ):  # not at the top level: DeepSpeed takes no such text there
            number = _number(value)
        if number is None:
            return value
        sifted.old_names.append(f"{show_name(path)} {show(value)} (now {show(number)})")
        return number

    return read(values, "")


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


@functools.cache
def _kinds() -> dict[str, type]:
    """bool and float by the path of each key that holds one; whole numbers count as float."""
    kinds: dict[str, type] = {}
    for path, owners in FIELDS.items():
        for owner in owners:
            annotation = owner.model.model_fields[owner.name].annotation
            for kind in (annotation, *get_args(annotation)):
                if kind is bool:
                    kinds[path] = bool
                elif kind in (int, float) or isinstance(kind, int):
                    kinds[path] = float
    for key in KEYS:
        if key.kind is BOOL:
            kinds[key.path] = bool
        elif key.kind in _NUMBERS:
            kinds[key.path] = float
    for new, old in _OLD.items():
        kinds |= {
            f"{old}{path[len(new) :]}": kind for path, kind in kinds.items() if path.startswith(f"{new}.")
        }
    return kinds
