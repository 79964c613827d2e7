"""What a Record has of a named tuple."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import pytest

from dslaunch.launcher.wire.fast_tuple import Record

RECORD: Any = Record


class Fast(RECORD):  # type: ignore[misc] # for the type checker a Record is something else
    a: int
    b: str = "x"


class Named(NamedTuple):
    a: int
    b: str = "x"


class Empty(RECORD):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    ("values", "more"),
    [((1, "y"), {}), ((1,), {}), ((), {"a": 1}), ((1,), {"b": "z"}), ((), {"b": "z", "a": 2})],
)
def test_it_is_made_as_a_named_tuple_is(values: tuple[Any, ...], more: dict[str, Any]) -> None:
    fast, named = Fast(*values, **more), Named(*values, **more)
    assert fast == named
    assert (fast.a, fast.b, fast[0], fast[-1]) == (named.a, named.b, named[0], named[-1])
    assert repr(fast) == repr(named).replace("Named", "Fast")
    assert fast._replace(a=7) == named._replace(a=7)
    assert pickle.loads(pickle.dumps(fast)) == fast
    assert hash(fast) == hash(named)


@pytest.mark.parametrize(
    ("values", "more"), [((), {}), ((1, "y", 3), {}), ((1,), {"a": 1}), ((1,), {"c": 1})]
)
def test_what_a_named_tuple_refuses_is_refused(values: tuple[Any, ...], more: dict[str, Any]) -> None:
    for kind in (Fast, Named):
        with pytest.raises(TypeError):
            kind(*values, **more)


def test_fields_cannot_be_set_and_there_may_be_none() -> None:
    with pytest.raises(AttributeError):
        Fast(1).a = 2
    assert Empty() == ()
    with pytest.raises(TypeError):
        Empty(1)
