"""The table of ranks or hosts in the columns for which there is room."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..run_state.metric_table import BYTES, DATA, SHARE, WAITING, WATTS, Metric, NumberUnit
from ..wording import shown_size
from .amounts import shown_many, shown_number, shown_seconds, shown_share
from .bars import Glyphs, bar, step_bar
from .rows import COLUMNS, TopRow
from .spans import Line, StyledText, cut, line, num_columns, padded

_GAP = 1
_MEM_BAR = 5
_MAX_STEP_BAR = 40
_MAX_WAITS = 24
_MAX_NAME = 16
# Width of a number, and its form; other units are shown unchanged.
_SHOWN: dict[NumberUnit, tuple[int, Callable[[float], str]]] = {
    BYTES: (8, lambda value: shown_size(int(value)) if math.isfinite(value) else str(value)),
    SHARE: (4, shown_share),
    WATTS: (6, lambda value: f"{value:.0f}W"),
}


class TableColumn(NamedTuple):
    """`rank` says which columns give way first where there is no room: those with the greatest. `cell` makes
    one cell in that width; rows are sorted by `value`.
    """

    title: str
    width: int
    rank: int
    cell: Callable[[TopRow, int, Glyphs], Line]
    value: Callable[[TopRow], float | str | None]
    is_right: bool = True
    grows_to: int = 0


def columns_for(rows: Sequence[TopRow], *, by_hosts: bool, has_numbers: bool) -> list[TableColumn]:
    """Return the columns that are not empty."""
    host_width = min(24, max((num_columns(one.host) for one in rows), default=0))
    host = TableColumn(
        "host", max(4, host_width), 0, _text(lambda row: row.host), lambda row: row.host, False
    )
    name_width = min(_MAX_NAME, max([5, *(num_columns(one.name) for one in rows)]))  # a server has its role
    name = _number("ranks" if by_hosts else "rank", name_width, 0, _of_name, lambda row: row.name)
    found = [host, name] if by_hosts else [name, host]
    found.append(
        TableColumn(
            "state",
            9,
            0,
            lambda row, *_: line(StyledText(row.state, row.state_style)),
            lambda row: row.state,
            False,
        )
    )
    if has_numbers:
        found += [
            _number("step", 7, 1, lambda row: row.step, lambda row: f"{row.step:,}"),
            _number(
                "s/step", 7, 1, _of_step, lambda row: shown_seconds(row.times.step_s if row.times else 0)
            ),
            TableColumn("of a step", 11, 1, _step_cell, _own_s, False, _MAX_STEP_BAR),
        ]
    if any(one.mem_share is not None for one in rows):
        found.append(TableColumn("memory", _MEM_BAR + 5, 2, _mem_cell, lambda row: row.mem_share, False))
    found += [_of_metric(one) for title, one in COLUMNS.items() if any(title in row.numbers for row in rows)]
    if any(one.net is not None for one in rows):
        found.append(_number("net B/s", 7, 7, lambda row: row.net, lambda row: shown_many(row.net or 0)))
    if not has_numbers:
        found.append(
            _number(
                "lines/s", 7, 1, lambda row: row.lines_per_s, lambda row: shown_many(row.lines_per_s or 0)
            )
        )
    if has_numbers:
        found.append(
            TableColumn(
                "waits for",
                11,
                1,
                lambda row, *_: line(StyledText(row.waits, row.waits_style)),
                _waiting,
                False,
                _MAX_WAITS,
            )
        )
    return found


def fit(columns: Sequence[TableColumn], width: int) -> list[TableColumn]:
    """Return the columns for which there is room, some of them wider where there is more."""
    kept = list(columns)
    while len(kept) > 1 and _needed(kept) > width:
        last = max(kept, key=lambda one: one.rank)
        if not last.rank:
            break
        kept.remove(last)
    left = width - _needed(kept)
    for place, one in enumerate(kept):
        more = min(left, max(0, one.grows_to - one.width))
        kept[place] = one._replace(width=one.width + more)
        left -= more
    return kept


def _needed(columns: Sequence[TableColumn]) -> int:
    return sum(one.width for one in columns) + _GAP * (len(columns) - 1)


def sorted_rows(rows: Sequence[TopRow], columns: Sequence[TableColumn], title: str) -> list[TopRow]:
    """Sort by a column: numbers the greatest first, words and ranks the other way; missing values last."""
    column = next((one for one in columns if one.title == title), None)
    if column is None:
        return sorted(rows, key=lambda row: row.key)
    told = [row for row in rows if column.value(row) is not None]
    rest = [row for row in rows if column.value(row) is None]
    is_up = title in ("rank", "host", "state", "ranks")
    told.sort(key=lambda row: row.key)
    if title in ("host", "state"):
        told.sort(key=lambda row: str(column.value(row)))
    else:
        told.sort(key=lambda row: float(column.value(row) or 0), reverse=not is_up)
    return told + rest


def head_line(columns: Sequence[TableColumn], sort: str) -> Line:
    """Return the titles; that of the column by which rows are sorted has a mark."""
    pieces: list[StyledText] = []
    for one in columns:
        mark = "*" if one.title == sort else ""
        pieces += [
            StyledText(padded(mark + one.title, one.width, is_right=one.is_right), "head"),
            StyledText(" " * _GAP, "head"),
        ]
    return line(*pieces[:-1])


def row_line(row: TopRow, columns: Sequence[TableColumn], glyphs: Glyphs) -> Line:
    """Return one row."""
    pieces: list[StyledText] = []
    for one in columns:
        cell = one.cell(row, one.width, glyphs)
        text = "".join(piece.text for piece in cell)
        space = StyledText(" " * max(0, one.width - num_columns(text)))
        if num_columns(text) > one.width:
            cell = line(StyledText(cut(text, one.width), cell[0].style if cell else ""))
        pieces += (
            [space, *cell, StyledText(" " * _GAP)] if one.is_right else [*cell, space, StyledText(" " * _GAP)]
        )
    if row.is_slowest:
        pieces = [one._replace(style="warn") if not one.style and one.text.strip() else one for one in pieces]
    return line(*pieces[:-1])


def _number(
    title: str, width: int, rank: int, value: Callable[[TopRow], float | None], text: Callable[[TopRow], str]
) -> TableColumn:
    def cell(row: TopRow, _: int, __: Glyphs) -> Line:
        return line("-" if value(row) is None else text(row))

    return TableColumn(title, width, rank, cell, value)


def _of_metric(metric: Metric) -> TableColumn:
    width, shown = _SHOWN.get(metric.unit, (max(7, len(metric.column)), shown_number))

    def value(row: TopRow) -> float | None:
        return row.numbers.get(metric.column)

    return _number(
        metric.column, width, metric.gives_way, value, lambda row: shown(row.numbers[metric.column])
    )


def _text(text: Callable[[TopRow], str]) -> Callable[[TopRow, int, Glyphs], Line]:
    return lambda row, *_: line(text(row))


def _of_name(row: TopRow) -> float:
    """Return the number of a rank, or of ranks; a server stands behind the ranks."""
    return float(row.name) if row.name.isdigit() else float(row.key)


def _of_step(row: TopRow) -> float | None:
    return None if row.times is None else row.times.step_s


def _own_s(row: TopRow) -> float | None:
    return None if row.times is None else row.times.own_s


def _waiting(row: TopRow) -> float | None:
    return None if row.times is None else row.times.of(WAITING, DATA)


def _step_cell(row: TopRow, width: int, _: Glyphs) -> Line:
    return line("-") if row.times is None or not row.times.has_phases else step_bar(row.times, width)


def _mem_cell(row: TopRow, _: int, glyphs: Glyphs) -> Line:
    if row.mem_share is None:
        return line("-")
    style = "bad" if row.mem_share > 0.95 else "warn" if row.mem_share > 0.9 else ""
    return line(StyledText(bar(row.mem_share, _MEM_BAR, glyphs), style), f" {shown_share(row.mem_share)}")
