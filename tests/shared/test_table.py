"""Tables have one form, whichever half prints them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

import pytest

from dslaunch.shared.table import table, terminal_columns

NUMBERS_TO_THE_RIGHT = """\
host    time  speed
node1   1 ms      9
node10
node2  10 ms     80
node3  did not answer"""
WORDS_TO_THE_LEFT = """\
Python  3.11
C       2.36"""


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
    rows: Sequence[Sequence[str]],
    head: Sequence[str],
    numbers: Collection[int],
    expected: str,
) -> None:
    assert "\n".join(table(rows, head=head, numbers=numbers)) == expected


WIDE = [("node1", "10 ms", "80", ""), ("node10", "9 ms", "8", "the other hosts are faster")]
IN_LINES = """\
node1
  time: 10 ms
  speed: 80
node10
  time: 9 ms
  speed: 8
  why: the
    other hosts
    are faster"""
IN_ITS_COLUMN = """\
node1   the other hosts
        are faster
node10  good"""


def test_a_table_that_is_wider_than_the_terminal_is_broken_in_its_last_column_or_becomes_lines() -> None:
    head = ("host", "time", "speed", "why")
    assert "\n".join(table(WIDE, head=head, numbers=(1, 2), columns=15)) == IN_LINES
    whole = table(WIDE, head=head, numbers=(1, 2))
    assert table(WIDE, head=head, numbers=(1, 2), columns=len(whole[2])) == whole
    rows = [("node1", "the other hosts are faster"), ("node10", "good")]
    assert "\n".join(table(rows, columns=24)) == IN_ITS_COLUMN


def test_only_a_terminal_has_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert terminal_columns() is None  # pytest has stdout
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert terminal_columns() == 40
