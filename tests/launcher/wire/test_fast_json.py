"""JSON as `json` writes and reads it, both ways that fast_json.py knows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.wire import fast_json

WAYS = [fast_json._fast(), fast_json._slow()]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def test_the_fast_way_works_on_this_python() -> None:
    assert fast_json.read.__qualname__.startswith("_fast")


@given(VALUES)
def test_it_is_what_json_writes_and_reads(value: Any) -> None:
    expected = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for write, read in WAYS:
        assert write(value) == expected
        assert read(expected) == json.loads(expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("text", ["", "[", "[1", "1 2", "{1:2}", '"\n"', "nul", "[1,]", "\x00"])
def test_what_is_no_json_is_a_value_error(text: str, way: tuple[Any, Callable[[str], Any]]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the words are those of json
        way[1](text)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    for _, read in WAYS:
        try:
            expected = json.loads(text)
        except ValueError:
            with pytest.raises(ValueError):  # noqa: PT011
                read(text)
        else:
            if text == text.strip():
                assert read(text) == expected or math.isnan(expected)


@pytest.mark.parametrize("way", WAYS)
def test_what_json_cannot_say_is_a_type_error(way: tuple[Callable[[Any], str], Any]) -> None:
    with pytest.raises(TypeError):
        way[0](b"bytes")
