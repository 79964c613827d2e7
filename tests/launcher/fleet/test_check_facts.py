from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.fleet.check_facts import MAX_TEXT, SHAPES, clean, read_answer
from dslaunch.launcher.node.observe.inspection import QUESTIONS, answer

DISK = {"problem": "", "size_bytes": 7, "free_bytes": 5}


@pytest.mark.parametrize(
    ("question", "facts", "expected"),
    [
        ("cwd", DISK, (DISK, "")),
        ("cwd", {**DISK, "more": 1}, (DISK, "")),
        ("cwd", {"problem": "", "size_bytes": 7}, (None, "free_bytes is None")),
        ("cwd", {**DISK, "free_bytes": "5"}, (None, "free_bytes is '5'")),
        ("cwd", {**DISK, "free_bytes": 5.5}, (None, "free_bytes is 5.5")),
        ("cwd", {**DISK, "problem": "a\x1b[31m\nb"}, ({**DISK, "problem": "a b"}, "")),
        ("cwd", {"error": "OSError: no"}, (None, "OSError: no")),
        ("cwd", {"error": ""}, (None, "it failed")),
        ("cwd", [1], (None, "[1] is no answer")),
        ("clock", {"time": 1}, ({"time": 1.0}, "")),
        ("clock", {"time": float("nan")}, (None, "time is nan")),
        ("gpu", {"driver": "", "names": [1, "a\n"], "num": 0},
         ({"driver": "", "names": ["1", "a "], "num": 0}, "")),
        ("strange", {}, (None, "{} is no answer")),
    ],
)  # fmt: skip
def test_an_answer_has_the_form_that_is_expected_or_says_nothing(
    question: str, facts: Any, expected: tuple[dict[str, Any] | None, str]
) -> None:
    assert read_answer(question, facts) == expected


@given(
    question=st.sampled_from(sorted(SHAPES)),
    facts=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["time", "num", "names", "error"]),
            inner),
        max_leaves=6,
    ),
)  # fmt: skip
def test_garbage_is_never_taken_for_an_answer_and_never_raises(question: str, facts: object) -> None:
    found, why = read_answer(question, facts)
    assert (found is None) == bool(why)


def test_text_of_a_host_is_one_short_line() -> None:
    assert clean("x" * 999) == "x" * MAX_TEXT + "..."
    assert clean("a\tb\r\nc\udc9b") == "a b  c?"


def test_every_question_has_a_form_for_its_answer() -> None:
    assert SHAPES.keys() == QUESTIONS.keys() - {"notice"}, "which jobs ask, and no check"


@pytest.mark.parametrize(
    ("question", "given_"),
    [("clock", {}), ("system", {}), ("shm", {"path": "/dev/shm"}), ("port_owner", {"port": 1})],
)
def test_this_host_s_own_answers_have_that_form(question: str, given_: dict[str, Any]) -> None:
    facts = answer(question, given_)
    assert facts.question == question
    assert read_answer(question, facts.facts)[1] == ""
