"""Stand-in for a name of DeepSpeed's that is not here: it can be imported and named,
and raises when it is used.

A program imports more than it uses: an optional layer, a type for an annotation, a class that a function
compares with. So each name is a class that has no instances: `isinstance()` says False, and annotations and
class statements take it. Calling it, or a class made from it, raises NotImplementedError with the name and
the reason. A constant has no such harmless use, so all that can be done with one raises: a wrong number or
key would go on in silence.
"""

from __future__ import annotations

import copyreg
from abc import ABCMeta
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

_USES = [
    "__call__",
    "__enter__",
    "__exit__",
    "__aenter__",
    "__aexit__",
    "__iter__",
    "__contains__",
    "__add__",
    "__radd__",
    "__sub__",
    "__rsub__",
    "__mul__",
    "__rmul__",
    "__truediv__",
    "__rtruediv__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__int__",
    "__float__",
    "__index__",
    "__await__",
]
_USES_OF_CONSTANTS = [
    "__eq__",
    "__ne__",
    "__hash__",
    "__bool__",
    "__str__",
    "__format__",
    "__len__",
    "__getitem__",
    "__fspath__",
]


class StandIn(ABCMeta):
    """The class of the stand-ins, which are classes.

    ABCMeta, so that a class can be made from one together with an ABC.
    """

    text: str

    def __instancecheck__(cls, instance: object) -> bool:
        return False

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(f"{cls.__name__}.{name}: {_text(cls)}", name=name)

    def __repr__(cls) -> str:
        return f"<{_text(cls)}>"


class Constant(StandIn):
    """The class of those that stand in for constants."""


def _text(cls: type) -> str:
    return next((vars(one)["_text"] for one in cls.__mro__ if "_text" in vars(one)), cls.__name__)


def _refusal(what: str) -> Callable[..., NoReturn]:
    def refuse(cls: type, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(_text(cls))

    refuse.__name__ = what
    return refuse


for _what in _USES:
    setattr(StandIn, _what, _refusal(_what))
for _what in _USES_OF_CONSTANTS:
    setattr(Constant, _what, _refusal(_what))


@cache
def stand_in(module: str, name: str, text: str) -> type:
    """Return what stands in for a name: the same one each time. `text` says why there is none.

    An exception is a class that nothing raises, for `except` clauses.
    """
    members: dict[str, Any] = {"__module__": module, "__qualname__": name, "__doc__": text}
    if name.endswith(("Error", "Exception")):
        return type(name, (Exception,), members)
    members |= {
        "_text": text,
        "__new__": _refusal("__new__"),
        "__class_getitem__": classmethod(_itself),
        "__init_subclass__": _any_keywords,
    }
    return Constant(name, (), members) if name.isupper() else StandIn(name, (), members)


def _pickled(cls: type) -> str | tuple[Callable[[str, str, str], type], tuple[str, str, str]]:
    """Return the value that pickle writes: how to have the stand-in in another process;
    of a class made from one, its name.
    """
    text = vars(cls).get("_text")
    return cls.__qualname__ if text is None else (stand_in, (cls.__module__, cls.__qualname__, text))


for _kind in (StandIn, Constant):
    copyreg.pickle(_kind, _pickled)  # type: ignore[arg-type]  # what is pickled are classes


def _itself(cls: type, _: object) -> type:
    return cls


def _any_keywords(cls: type, **_: object) -> None:
    """`class Mine(TheirConfig, extra="allow")` is as far as a program may come."""
