"""Answers of a plan for values that are not known."""

from __future__ import annotations

import pytest
import torch

from dslaunch.runtime.plan.guesses import Guess, Guesses


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float16, 1.0), (torch.int64, 1), (torch.bool, False)], ids=str
)
def test_a_scalar_is_of_its_type_and_a_flag_that_decides_is_noted(
    dtype: torch.dtype, expected: object
) -> None:
    guesses = Guesses()
    found = guesses.scalar(dtype)
    assert (type(found), found) == (type(expected), expected)
    noted = ["a tensor of flags decides; the plan goes on as if it were False"]
    assert list(guesses.lines.values()) == (noted if dtype is torch.bool else [])


def test_a_number_is_noted_where_the_program_compares_it() -> None:
    guesses = Guesses()
    guess = guesses.number(torch.float32)
    assert (type(guess), guess + 1) == (Guess, 2.0)
    assert guesses.lines == {}
    assert guess <= 1
    ((line, what),) = guesses.lines.items()
    assert line.startswith(f"{__file__}:")
    assert what == "a number of a tensor decides; the plan goes on as if it were 1"
