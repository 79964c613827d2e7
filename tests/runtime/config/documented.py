"""Keys of a ds_config with what the documents say of each."""

from __future__ import annotations

import ast
import functools
import inspect
from dataclasses import replace
from itertools import pairwise

from dslaunch.runtime.config.key_table import FIELDS, KEYS
from dslaunch.runtime.config.keys.key import Key
from dslaunch.runtime.config.section import Section


@functools.cache
def docstrings(model: type[Section]) -> dict[str, str]:
    """The docstring of each field that has one, those of the model's bases included."""
    found = {}
    for base in (one for one in reversed(model.__mro__) if issubclass(one, Section)):
        (cls,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(cls, ast.ClassDef)
        for field, after in pairwise(cls.body):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(after.value).split())
    described = {name: field.description for name, field in model.model_fields.items() if field.description}
    return {**found, **described}


def documented() -> tuple[Key, ...]:
    """KEYS, in which the note of a key that is used is what its field says: the first one that does, where
    several types have the key.
    """

    def note_of(key: Key) -> str:
        said = (docstrings(owner.model).get(owner.name) for owner in FIELDS.get(key.path, ()))
        return next(filter(None, said), key.note)

    return tuple(replace(key, note=note_of(key)) for key in KEYS)
