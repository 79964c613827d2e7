"""Rows as columns: the form of every table of the launcher; runtime/table.py has the same."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_BETWEEN = "  "


def table(
    rows: Sequence[Sequence[str]], *, head: Sequence[str] = (), numbers: Collection[int] = ()
) -> list[str]:
    """Return one line for each row, columns two spaces apart, words to the left and numbers to the right.

    `head` names the columns, with their units where cells have none; `numbers` are the columns, from 0,
    that stand to the right. The last cell of a row that is shorter than others is a remark, and
    makes no column wider.
    """
    lines = [*([head] if head else []), *rows]
    num_columns = max((len(line) for line in lines), default=0)
    widths = [0] * num_columns
    for line in lines:
        for column, cell in enumerate(line if len(line) == num_columns else line[:-1]):
            widths[column] = max(widths[column], len(cell))
    return [
        _BETWEEN.join(
            cell.rjust(widths[column]) if column in numbers else cell.ljust(widths[column])
            for column, cell in enumerate(line)
        ).rstrip()
        for line in lines
    ]
