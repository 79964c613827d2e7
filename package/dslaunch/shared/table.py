"""Tables: the form of every table that a person reads."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from shutil import get_terminal_size

_BETWEEN = "  "
_MIN_LAST = 16  # columns that a last cell needs, to be broken in its column


def terminal_columns() -> int | None:
    """Return the width of a table on stdout: the terminal's, or that in COLUMNS.

    None: any width, for a file or a pipe.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return get_terminal_size().columns


def table(
    rows: Sequence[Sequence[str]],
    *,
    head: Sequence[str] = (),
    numbers: Collection[int] = (),
    columns: int | None = None,
) -> list[str]:
    """Return one line for each row, columns two spaces apart, words to the left and numbers to the right.

    `head` names the columns, with their units where cells have none; `numbers` are the columns, from 0,
    that stand to the right. The last cell of a row that is shorter than others is a remark, and
    makes no column wider. What is wider than `columns` has its last cells broken between words; where that
    is not enough each row becomes lines of its own, one for each cell.
    """
    lines = [*([head] if head else []), *rows]
    num_columns = max((len(line) for line in lines), default=0)
    widths = [0] * num_columns
    for line in lines:
        for column, cell in enumerate(line if len(line) == num_columns else line[:-1]):
            widths[column] = max(widths[column], len(cell))
    shown = [_BETWEEN.join(_set(line, widths, numbers)).rstrip() for line in lines]
    if columns is None or all(len(line) <= columns for line in shown):
        return shown
    before = sum(widths[:-1]) + len(_BETWEEN) * (num_columns - 1)
    if num_columns - 1 not in numbers and columns - before >= _MIN_LAST:
        return [piece for line in shown for piece in _broken(line, columns, hang=before)]
    return [piece for row in rows for piece in _as_lines(row, head, columns)]


def _set(line: Sequence[str], widths: Sequence[int], numbers: Collection[int]) -> Iterator[str]:
    for column, cell in enumerate(line):
        yield cell.rjust(widths[column]) if column in numbers else cell.ljust(widths[column])


def _as_lines(row: Sequence[str], head: Sequence[str], columns: int) -> Iterator[str]:
    """The first cell, and below it the others, each behind the title of its column."""
    for column, cell in enumerate(row):
        title = head[column] if column < len(head) and len(row) == len(head) else ""
        if cell or not column:
            line = cell if not column else f"{_BETWEEN}{title}: {cell}" if title else f"{_BETWEEN}{cell}"
            yield from _broken(line, columns, hang=len(_BETWEEN) * 2 if column else 0)


def _broken(line: str, columns: int, *, hang: int) -> list[str]:
    return textwrap.wrap(
        line, columns, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False
    ) or [line]
