from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.inputs.rank_set import format_ranks, parse_ranks


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", [0]),
        ("0,4-7", [0, 4, 5, 6, 7]),
        ("4-7,0", [4, 5, 6, 7, 0]),
        (" 0 , 2 ", [0, 2]),
        ("3-3", [3]),
        ("007", [7]),
        ("none", []),
        ("NONE", []),
    ],
)
def test_ranks_are_numbers_and_ranges(text: str, ranks: list[int]) -> None:
    assert [rank for one in parse_ranks(text) for rank in one] == ranks


def test_all_is_every_rank() -> None:
    (ranks,) = parse_ranks("all")
    assert 0 in ranks
    assert 999_999 in ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a rank; write ranks and ranges such as 0,4-7, or all, or none"),
        ("0,", "'' is not a rank"),
        ("a", "'a' is not a rank"),
        ("-1", "'-1' is not a rank"),
        ("1-", "'1-' is not a rank"),
        ("1-2-3", "'1-2-3' is not a rank"),
        ("1:2", "'1:2' is not a rank"),
        ("0 4", "'0 4' is not a rank"),
        ("12345678", "'12345678' is not a rank"),
        ("\u0663", "'\u0663' is not a rank"),
        ("0,7-4", "'7-4' is an empty range; write 4-7"),
        ("all,0", "'all' is not a rank"),
    ],
)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        parse_ranks(text)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([0, 1], "0-1"),
        ([3, 1, 2, 0, 7], "0-3,7"),
        ([0, 2, 4], "0,2,4"),
        ([1, 1, 2], "1-2"),
        (range(512), "0-511"),
    ],
)
def test_the_shortest_form(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


@given(ranks=st.frozensets(st.integers(0, 40), min_size=1))
def test_what_is_written_is_read_back(ranks: frozenset[int]) -> None:
    assert [rank for one in parse_ranks(format_ranks(ranks)) for rank in one] == sorted(ranks)
