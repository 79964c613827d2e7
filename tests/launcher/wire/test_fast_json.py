"""JSON as `json` writes and reads it, both ways that fast_json.py knows."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.wire import fast_json

BAD_TEXTS = ["", "[", "{", "[1", "1 2", "{1:2}", '"\n"', "nul", "[1,]", "\x00"]
AS_IN_AN_AGENT = """
import runpy, sys
read = runpy.run_path(sys.argv[1])["read"]
for text in eval(sys.argv[2]):
    try:
        read(text)
    except ValueError:
        continue
    sys.exit(f"{text!r} was read")
assert "json" not in sys.modules
"""
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
@pytest.mark.parametrize("text", BAD_TEXTS)
def test_what_is_no_json_is_a_value_error(text: str, way: tuple[Any, Callable[[str], Any]]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the words are those of json
        way[1](text)


def test_it_is_one_where_json_was_never_imported_too() -> None:
    """The C functions take the class of their errors from `json`, and an agent has not imported it."""
    command = [sys.executable, "-I", "-S", "-c", AS_IN_AN_AGENT, str(fast_json.__file__), repr(BAD_TEXTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


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
