"""Tables have one form, whichever half prints them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import pytest

from dslaunch.launcher.output import table as of_launcher
from dslaunch.runtime import table as of_runtime

NUMBERS_TO_THE_RIGHT = """\
host    time  speed
node1   1 ms      9
node10
node2  10 ms     80
node3  did not answer"""
WORDS_TO_THE_LEFT = """\
Python  3.11
C       2.36"""


@pytest.mark.parametrize("table", [of_launcher.table, of_runtime.table])
@pytest.mark.parametrize(
    ("rows", "head", "numbers", "expected"),
    [
        (
            [("node1", "1 ms", "9"), ("node10",), ("node2", "10 ms", "80"), ("node3", "did not answer")],
            ("host", "time", "speed"),
            (1, 2),
            NUMBERS_TO_THE_RIGHT,
        ),
        ([("Python", "3.11"), ("C", "2.36")], (), (), WORDS_TO_THE_LEFT),
        ([], (), (), ""),
        ([], ("host", "time"), (1,), "host  time"),
    ],
)
def test_a_table_is_columns_two_spaces_apart_and_a_short_row_ends_with_a_remark(
    table: Callable[..., list[str]],
    rows: Sequence[Sequence[str]],
    head: Sequence[str],
    numbers: Collection[int],
    expected: str,
) -> None:
    assert "\n".join(table(rows, head=head, numbers=numbers)) == expected
