"""Charts of parts of a whole, and of stretches of time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bokeh.models import ColumnDataSource, FactorRange

from .chart import Chart, shown, some_of
from .figures import (
    COLORS,
    GREY,
    RED,
    ChartAxis,
    add_hover,
    empty_figure,
    mark_starts,
    numbers,
    place_legend,
    plain,
)

_AROUND = 90  # CSS pixels of a chart beside its rows: legend, axis
_ROW_HEIGHT = 20
_LOW_ROW_HEIGHT = 13
_MANY_ROWS = 16  # from this number on rows are low
_MAX_LISTED = 60

Parts = Mapping[str, float]


class PartNames(NamedTuple):
    """The names of a chart of parts: its key in the page, its title, its unit, and the names of the parts."""

    key: str
    title: str
    unit: str
    parts: Mapping[str, str]


class Stretch(NamedTuple):
    """Seconds from `begin` to `end` in a row; a moment if they are equal. `words` stand at the pointer."""

    row: str
    begin: float
    end: float
    kind: str
    words: str


def stack_chart(points: Sequence[tuple[float, int, Parts]], names: PartNames, *, axis: ChartAxis) -> Chart:
    """Draw parts of a whole over time, one above the other, with the attempt and the amount of each."""
    parts = _present(names, (row for _, _, row in points))
    rows: list[tuple[float, Parts]] = []
    before: tuple[float, int] | None = None
    for at, attempt, row in points:
        if before is not None and attempt != before[1]:
            rows.extend(((before[0], {}), (at, {})))  # there is nothing between attempts
        before = at, attempt
        rows.append((at, row))
    data = _columns(parts, [row for _, row in rows])
    data["x"] = numbers([axis.place(at) for at, _ in rows])
    made = empty_figure(axis, label=names.unit)
    made.y_range.start = 0
    source = ColumnDataSource(data)
    if parts:
        made.varea_stack(
            parts,
            x="x",
            source=source,
            fill_color=_colors(parts),
            fill_alpha=0.85,
            legend_label=[names.parts[one] for one in parts],
        )
        place_legend(made)
    top = made.line("x", "whole", source=source, color=GREY, line_width=1)
    mark_starts(made, axis)
    add_hover(made, [(axis.noun, "@x{%.5g}"), *_tips(parts, names)], renderers=[top], mode="vline")
    return Chart(
        key=names.key,
        title=names.title,
        summary=f"{names.title}: {_shares(parts, names, [row for _, _, row in points])}.",
        figure=made,
        head=(axis.label, *_head(parts, names)),
        rows=some_of([(shown(axis.place(at)), *_cells(parts, row)) for at, _, row in points]),
    )


def bar_chart(
    rows: Sequence[tuple[str, Parts]], names: PartNames, *, marks: Parts | None = None, mark: str = ""
) -> Chart:
    """Draw parts of a whole for each rank or host, side by side. `marks` are further numbers, one for each
    row, with the name `mark`.
    """
    marks = marks or {}
    parts = _present(names, (row for _, row in rows))
    labels = _unique([plain(name) for name, _ in rows])
    is_low = len(rows) > _MANY_ROWS
    made = empty_figure(
        None,
        label="",
        height=_AROUND + (_LOW_ROW_HEIGHT if is_low else _ROW_HEIGHT) * len(rows),
        y_range=FactorRange(factors=labels[::-1]),
    )
    made.x_range.start = 0
    made.xaxis.axis_label = names.unit
    made.ygrid.grid_line_color = None
    if is_low:
        made.yaxis.major_label_text_font_size = "10px"
    source = ColumnDataSource(_columns(parts, [row for _, row in rows]) | {"who": labels})
    if parts:
        made.hbar_stack(
            parts,
            y="who",
            height=0.72,
            source=source,
            fill_color=_colors(parts),
            line_color=None,
            legend_label=[names.parts[one] for one in parts],
        )
    if marks:
        at = numbers([marks.get(name, math.nan) for name, _ in rows])
        look = {"marker": "dash", "angle": math.pi / 2, "size": 12, "line_width": 2.5, "color": RED}
        made.scatter(x=at, y=labels, legend_label=mark, **look)
    if made.legend:
        place_legend(made)
    add_hover(made, [("", "@who"), *_tips(parts, names)], mode="hline")
    greatest = max(rows, key=lambda one: sum(one[1].get(part, 0.0) for part in parts))[0]
    shares = _shares(parts, names, [row for _, row in rows])
    return Chart(
        key=names.key,
        title=names.title,
        summary=f"{names.title}: {greatest} has most; of all: {shares}.",
        figure=made,
        head=("", *_head(parts, names), *((mark,) if marks else ())),
        rows=tuple(
            (name, *_cells(parts, row), *((shown(marks.get(name, math.nan), 3),) if marks else ()))
            for name, row in rows
        ),
    )


def span_chart(
    stretches: Sequence[Stretch],
    names: PartNames,
    *,
    axis: ChartAxis | None = None,
) -> Chart:
    """Draw stretches of time in rows; `parts` of the names are the colors of their kinds.

    Without an axis of the page it has one of its own, in seconds, and `unit` is its label.
    """
    rows = list(dict.fromkeys(one.row for one in stretches))
    made = empty_figure(
        axis,
        label="",
        height=_AROUND + (_ROW_HEIGHT + 4) * len(rows),
        y_range=FactorRange(factors=[plain(one) for one in rows][::-1]),
    )
    made.window_axis = "none"
    made.ygrid.grid_line_color = None
    if axis is None:
        made.xaxis.axis_label = names.unit
    scale = axis.scale if axis is not None else 1.0
    for kind, color in names.parts.items():
        of_kind = [one for one in stretches if one.kind == kind]
        long = [one for one in of_kind if one.end > one.begin]
        look: dict[str, Any] = {"fill_color": color, "line_color": color, "legend_label": plain(kind)}
        if long:
            made.hbar(y="row", left="begin", right="end", height=0.7, source=_source(long, scale), **look)
        moments = [one for one in of_kind if one.end <= one.begin]
        if moments:
            made.scatter("begin", "row", marker="diamond", size=12, source=_source(moments, scale), **look)
    if made.legend:
        place_legend(made)
    add_hover(made, [("", "@words")])
    listed = sorted(stretches, key=lambda one: one.begin)
    num_moments = sum(one.end <= one.begin for one in stretches)
    words = f"{len(stretches) - num_moments} stretches and {num_moments} moments"
    return Chart(
        key=names.key,
        title=names.title,
        summary=f"{names.title}: {words}, which the table has.",
        figure=made,
        head=("from", "to", "what", ""),
        rows=some_of(
            [(shown(one.begin / scale), shown(one.end / scale), one.row, one.words[:200]) for one in listed],
            _MAX_LISTED,
        ),
    )


def _source(stretches: Sequence[Stretch], scale: float) -> Any:
    return ColumnDataSource(
        {
            "row": [plain(one.row) for one in stretches],
            "begin": numbers([one.begin / scale for one in stretches]),
            "end": numbers([one.end / scale for one in stretches]),
            "words": [plain(one.words) for one in stretches],
        }
    )


def _present(names: PartNames, rows: Iterable[Parts]) -> list[str]:
    """Return the parts that are not zero everywhere."""
    known = {name for row in rows for name, value in row.items() if value > 0}
    return [one for one in names.parts if one in known]


def _columns(parts: Sequence[str], rows: Sequence[Parts]) -> dict[str, Any]:
    columns = {part: numbers([row.get(part, 0.0) for row in rows]) for part in parts}
    return columns | {"whole": numbers([sum(row.get(part, 0.0) for part in parts) for row in rows])}


def _colors(parts: Sequence[str]) -> list[str]:
    return [COLORS[place % len(COLORS)] for place in range(len(parts))]


def _tips(parts: Sequence[str], names: PartNames) -> list[tuple[str, str]]:
    return [*((names.parts[part], f"@{part}{{%.4g}}") for part in parts), ("all", "@whole{%.4g}")]


def _head(parts: Sequence[str], names: PartNames) -> list[str]:
    return [f"{names.parts[part]} ({names.unit})" for part in parts]


def _cells(parts: Sequence[str], row: Parts) -> list[str]:
    return [shown(row.get(part, 0.0), 3) for part in parts]


def _shares(parts: Sequence[str], names: PartNames, rows: Sequence[Parts]) -> str:
    totals = {part: sum(row.get(part, 0.0) for row in rows) for part in parts}
    whole = sum(totals.values()) or 1.0
    return ", ".join(f"{names.parts[part]} {100 * value / whole:.0f} %" for part, value in totals.items())


def _unique(labels: list[str]) -> list[str]:
    """Make the labels unique, as rows of a chart must be."""
    seen: dict[str, int] = {}
    found = []
    for one in labels:
        seen[one] = seen.get(one, 0) + 1
        found.append(one if seen[one] == 1 else f"{one} ({seen[one]})")
    return found
