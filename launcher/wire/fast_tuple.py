"""Named tuples whose classes are made fast.

`typing.NamedTuple` writes and compiles a program for each class, and importing `typing` takes as long as ten
of them: 9 ms of CPU on every host of a job, of 37 until an agent was up. Classes that are made of `Record`
take microseconds. For the type checker a Record is a NamedTuple:

    TYPE_CHECKING = False
    if TYPE_CHECKING:
        from typing import NamedTuple
    else:
        from .record import Record as NamedTuple
"""

from __future__ import annotations

try:
    from _collections import _tuplegetter as field_of  # type: ignore[import-not-found] # what namedtuple uses in CPython
except ImportError:  # another Python

    def field_of(place: int, doc: str) -> property:
        return property(lambda self: self[place])


class Record(tuple):  # type: ignore[type-arg] # never seen by a type checker
    """A tuple whose fields are the annotations of its class, in order;
    a value in the class is a field's default.
    """

    _fields: tuple[str, ...] = ()
    _defaults: dict[str, object] = {}  # noqa: RUF012 - one for each class, never changed

    def __init_subclass__(cls) -> None:
        cls._fields = tuple(cls.__dict__.get("__annotations__", ()))  # noqa: RUF063 - cheaper
        cls._defaults = {name: cls.__dict__[name] for name in cls._fields if name in cls.__dict__}
        for place, name in enumerate(cls._fields):
            setattr(cls, name, field_of(place, ""))

    def __new__(cls, *values: object, **more: object) -> Record:
        if len(values) != len(cls._fields) or more:
            values = cls._complete(values, more)
        return tuple.__new__(cls, values)

    @classmethod
    def _complete(cls, values: tuple[object, ...], more: dict[str, object]) -> tuple[object, ...]:
        found = {**cls._defaults, **dict(zip(cls._fields, values)), **more}  # noqa: B905 - `strict` needs Python 3.10
        is_twice = bool(more.keys() & set(cls._fields[: len(values)]))
        if len(values) > len(cls._fields) or is_twice or found.keys() != set(cls._fields):
            raise TypeError(
                f"{cls.__name__} takes {', '.join(cls._fields) or 'nothing'}; given {values} {more}"
            )
        return tuple(found[name] for name in cls._fields)

    def _replace(self, **more: object) -> Record:
        """Return the same record with other values for some fields."""
        return type(self)(**{**dict(zip(self._fields, self)), **more})  # noqa: B905 - as above

    def __getnewargs__(self) -> tuple[object, ...]:
        return tuple(self)  # for pickle and copy

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self))  # noqa: B905 - as above
        return f"{type(self).__name__}({fields})"
