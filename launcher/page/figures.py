"""Charts by Bokeh: the only file that knows it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.embed import components
from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    CrosshairTool,
    DataRange1d,
    FactorRange,
    HoverTool,
    ResetTool,
    SaveTool,
    Span,
)
from bokeh.plotting import figure
from bokeh.resources import Resources

from .chart import Chart, TimeUnit, shown, some_of
from .series import Curve, Point

# Each can be told from a white and from a dark background: a contrast of 3 at least.
COLORS = ("#2f7ed8", "#cf6a0c", "#2e9a58", "#d9484d", "#955be0", "#1b95a3", "#cf4698", "#9c7618")
GREY = "#7d8590"
HEIGHT = 230  # CSS pixels
_ROW_HEIGHT = 20
_GLYPH: dict[str, Any] = {"line_width": 1.6}
_HOVER: dict[str, Any] = {"attachment": "vertical", "show_arrow": False}


class Axis:
    """The axis of time of all charts of a page: who zooms one of them zooms all, and a line follows the pointer in all."""

    def __init__(self, label: str, *, scale: float = 1.0, starts: Sequence[float] = ()) -> None:
        """`starts` are where attempts begin, in seconds."""
        self.label, self.scale = label, scale
        self.range: Any = DataRange1d(range_padding=0.01)
        self.line = Span(dimension="height", line_color=GREY, line_width=1)
        self.starts = [one / scale for one in starts]

    def place(self, value: float) -> float:
        return value / self.scale


def time_axis(unit: TimeUnit, starts: Sequence[float]) -> Axis:
    return Axis(f"time since the start ({unit.name})", scale=unit.seconds, starts=starts)


def _figure(axis: Axis | None, *, label: str, height: int = HEIGHT, **given: Any) -> Any:
    """An empty chart."""
    zoom = BoxZoomTool(dimensions="width" if axis is not None else "both")
    tools: list[Any] = [zoom, ResetTool(), SaveTool()]
    if axis is not None:
        given["x_range"] = axis.range
        tools.append(CrosshairTool(dimensions="height", overlay=axis.line))
    made = figure(
        height=height,
        min_width=200,
        sizing_mode="stretch_width",
        tools=tools,
        active_drag=zoom,
        toolbar_location="right",
        output_backend="canvas",
        background_fill_alpha=0.0,
        border_fill_alpha=0.0,
        outline_line_color=None,
        **given,
    )
    made.toolbar.logo = None
    made.toolbar.autohide = True
    made.xaxis.axis_label = None if axis is None else axis.label
    made.yaxis.axis_label = label or None
    for one in (*made.xaxis, *made.yaxis):
        one.axis_label_text_font_style = "normal"
        one.minor_tick_line_color = None
    if axis is not None:
        made.window_axis = "x"  # what is shown decides how high the chart reaches
    return made


def _mark_starts(made: Any, axis: Axis) -> None:
    if axis.starts:
        made.vspan(x=np.array(axis.starts, dtype=np.float32), line_color=GREY, line_dash="dotted", line_width=1)


def _numbers(values: Sequence[float]) -> Any:
    """As few bytes as show them: seven digits."""
    with np.errstate(over="ignore"):
        return np.array(values, dtype=np.float64).astype(np.float32)


def _with_gaps(points: Sequence[Point]) -> list[Point]:
    """A point that is nowhere between attempts: no line joins them."""
    found: list[Point] = []
    for one in points:
        if found and found[-1].attempt != one.attempt:
            found.append(Point(one.at, one.attempt, math.nan, math.nan, math.nan, "", "", {}))
        found.append(one)
    return found


def curve_chart(
    curve: Curve,
    *,
    key: str,
    title: str,
    unit: str,
    axis: Axis,
    whose: str,
    scale: float = 1.0,
    steps: Curve | None = None,
    from_zero: bool = False,
) -> Chart:
    """One quantity over time. Of up to eight ranks (or hosts, as `whose` says) each has a line; of more
    there are the mean, and the band from the least to the greatest.

    `scale` divides the numbers. `steps` tells the step of each time.
    """
    points = _with_gaps(curve.points())
    at = [axis.place(one.at) for one in points]
    data: dict[str, Any] = {
        "x": _numbers(at),
        "mean": _numbers([one.mean / scale for one in points]),
    }
    tips = [(axis.label.partition(" (")[0].removesuffix(" since the start"), "@x{%.5g}")]
    formatters = {"@x": "printf", "@mean": "printf", "@low": "printf", "@high": "printf"}
    if steps is not None and steps:
        known = steps.points()
        data["step"] = np.round(
            np.interp([one.at for one in points], [one.at for one in known], [one.high for one in known])
        ).astype(np.int32)
        tips.append(("step", "@step"))
    made = _figure(axis, label=unit)
    if from_zero:
        made.y_range.start = 0
    _mark_starts(made, axis)
    keys = list(curve.keys)
    is_spread = any(one.low != one.high for one in points if not math.isnan(one.mean))
    if curve.has_lines:
        for place, name in enumerate(keys):
            data[f"each{place}"] = _numbers([one.each.get(name, math.nan) / scale for one in points])
            tips.append((f"{whose} {plain(name)}", f"@each{place}{{%.5g}}"))
            formatters[f"@each{place}"] = "printf"
    elif is_spread:
        data["low"] = _numbers([one.low / scale for one in points])
        data["high"] = _numbers([one.high / scale for one in points])
        tips.append(("mean", "@mean{%.5g}"))
        tips.append(("greatest", "@high{%.5g}" + (f" ({whose} @high_key)" if whose else "")))
        tips.append(("least", "@low{%.5g}" + (f" ({whose} @low_key)" if whose else "")))
        if whose:
            data["low_key"] = [plain(one.low_key) for one in points]
            data["high_key"] = [plain(one.high_key) for one in points]
    else:
        tips.append((unit or "value", "@mean{%.5g}"))
    source = ColumnDataSource(data)
    if curve.has_lines:
        lines = [
            made.line(
                "x", f"each{place}", source=source, color=COLORS[place], legend_label=f"{whose} {plain(name)}", **_GLYPH
            )
            for place, name in enumerate(keys)
        ]
        main = lines[0]
        _place_legend(made)
    else:
        if is_spread:
            made.varea("x", "low", "high", source=source, fill_color=COLORS[0], fill_alpha=0.25)
        main = made.line("x", "mean", source=source, color=COLORS[0], **_GLYPH)
    if sum(not math.isnan(one.mean) for one in points) < 3:  # a line of one point is not seen
        made.scatter("x", "mean", source=source, color=COLORS[0], size=6)
    made.add_tools(HoverTool(renderers=[main], mode="vline", tooltips=tips, formatters=formatters, **_HOVER))
    if curve.gaps:
        gaps = _numbers([axis.place(one) for one in curve.gaps])
        made.vspan(x=gaps, line_color=COLORS[3], line_width=2, line_alpha=0.7)
    shown_points = [one for one in points if not math.isnan(one.mean)]
    return Chart(
        key=key,
        title=title,
        summary=_summary(title, unit, shown_points, curve, scale=scale, whose=whose),
        figure=made,
        head=(axis.label, f"least {unit}".strip(), f"mean {unit}".strip(), f"greatest {unit}".strip()),
        rows=some_of(
            [
                (
                    shown(axis.place(one.at)),
                    shown(one.low / scale) + (f" ({one.low_key})" if one.low_key else ""),
                    shown(one.mean / scale),
                    shown(one.high / scale) + (f" ({one.high_key})" if one.high_key else ""),
                )
                for one in shown_points
            ]
        ),
    )


def _summary(title: str, unit: str, points: Sequence[Point], curve: Curve, *, scale: float, whose: str) -> str:
    if not points:
        return f"{title}: no number."
    low, high = min(points, key=lambda one: one.low), max(points, key=lambda one: one.high)

    def named(key: str) -> str:
        return f" ({whose} {key})" if whose and key else ""

    text = (
        f"{title}: {shown(points[0].mean / scale)} at first, {shown(points[-1].mean / scale)} at last; least "
        f"{shown(low.low / scale)}{named(low.low_key)}, greatest {shown(high.high / scale)}{named(high.high_key)}"
        f"{' ' + unit if unit else ''}."
    )
    if curve.num_gaps:
        text += f" At {curve.num_gaps} times it was NaN or infinite (red lines)."
    return text


def _place_legend(made: Any) -> None:
    legend = made.legend[0]
    legend.click_policy = "hide"
    legend.orientation = "horizontal"
    legend.ncols = 4
    legend.background_fill_alpha = 0.0
    legend.border_line_color = None
    legend.padding = 0
    legend.margin = 0
    legend.label_text_font_size = "12px"
    made.add_layout(legend, "above")


def stack_chart(
    points: Sequence[tuple[float, int, Mapping[str, float]]],
    *,
    names: Mapping[str, str],
    key: str,
    title: str,
    unit: str,
    axis: Axis,
) -> Chart:
    """Parts of a whole over time, one above the other. `names` are what the parts are called."""
    parts = [one for one in names if any(row.get(one, 0.0) > 0 for _, _, row in points)]
    rows: list[tuple[float, Mapping[str, float]]] = []
    before = None
    for at, attempt, row in points:
        if before is not None and attempt != before:
            rows.append((at, {}))  # the stack falls to nothing between attempts
        before = attempt
        rows.append((at, row))
    data: dict[str, Any] = {"x": _numbers([axis.place(at) for at, _ in rows])}
    for part in parts:
        data[part] = _numbers([row.get(part, 0.0) for _, row in rows])
    data["whole"] = _numbers([sum(row.get(part, 0.0) for part in parts) for _, row in rows])
    made = _figure(axis, label=unit)
    made.y_range.start = 0
    source = ColumnDataSource(data)
    colors = [COLORS[place % len(COLORS)] for place in range(len(parts))]
    if parts:
        made.varea_stack(
            parts, x="x", source=source, fill_color=colors, fill_alpha=0.85, legend_label=[names[one] for one in parts]
        )
        _place_legend(made)
    top = made.line("x", "whole", source=source, color=GREY, line_width=1)
    _mark_starts(made, axis)
    tips = [("time", "@x{%.5g}"), *((names[part], f"@{part}{{%.4g}}") for part in parts), ("all", "@whole{%.4g}")]
    formatters = {f"@{name}": "printf" for name in data}
    made.add_tools(HoverTool(renderers=[top], mode="vline", tooltips=tips, formatters=formatters, **_HOVER))
    totals = {part: sum(row.get(part, 0.0) for _, _, row in points) for part in parts}
    whole = sum(totals.values()) or 1.0
    shares = ", ".join(f"{names[part]} {100 * value / whole:.0f} %" for part, value in totals.items())
    return Chart(
        key=key,
        title=title,
        summary=f"{title}: {shares}.",
        figure=made,
        head=(axis.label, *(f"{names[part]} ({unit})" for part in parts)),
        rows=some_of(
            [
                (shown(axis.place(at)), *(shown(row.get(part, 0.0), 3) for part in parts))
                for at, _, row in points
            ]
        ),
    )


def bar_chart(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    *,
    names: Mapping[str, str],
    key: str,
    title: str,
    unit: str,
    marks: Mapping[str, float] | None = None,
    mark: str = "",
) -> Chart:
    """Parts of a whole for each rank or host, side by side. `marks` are further numbers, one for each row."""
    parts = [one for one in names if any(row.get(one, 0.0) > 0 for _, row in rows)]
    labels = _unique([plain(name) for name, _ in rows])
    data: dict[str, Any] = {"who": labels}
    for part in parts:
        data[part] = _numbers([row.get(part, 0.0) for _, row in rows])
    data["whole"] = _numbers([sum(row.get(part, 0.0) for part in parts) for _, row in rows])
    made = _figure(
        None,
        label="",
        height=90 + _ROW_HEIGHT * len(rows),
        y_range=FactorRange(factors=labels[::-1]),
    )
    made.x_range.start = 0
    made.xaxis.axis_label = unit
    made.ygrid.grid_line_color = None
    source = ColumnDataSource(data)
    colors = [COLORS[place % len(COLORS)] for place in range(len(parts))]
    if parts:
        made.hbar_stack(
            parts,
            y="who",
            height=0.72,
            source=source,
            fill_color=colors,
            line_color=None,
            legend_label=[names[one] for one in parts],
        )
        _place_legend(made)
    tips = [
        ("", "@who"),
        *((names[part], f"@{part}{{%.4g}}") for part in parts),
        ("all", "@whole{%.4g}"),
    ]
    formatters = {f"@{name}": "printf" for name in data if name != "who"}
    made.add_tools(HoverTool(mode="hline", tooltips=tips, formatters=formatters, **_HOVER))
    if marks:
        made.scatter(
            x=_numbers([marks.get(name, math.nan) for name, _ in rows]),
            y=labels,
            marker="dash",
            angle=math.pi / 2,
            size=14,
            line_width=2.5,
            color=COLORS[3],
            legend_label=mark,
        )
    greatest = max(rows, key=lambda one: sum(one[1].get(part, 0.0) for part in parts))
    totals = {part: sum(row.get(part, 0.0) for _, row in rows) for part in parts}
    whole = sum(totals.values()) or 1.0
    shares = ", ".join(f"{names[part]} {100 * value / whole:.0f} %" for part, value in totals.items())
    return Chart(
        key=key,
        title=title,
        summary=f"{title}: most of {greatest[0]}; of all: {shares}.",
        figure=made,
        head=("", *(f"{names[part]} ({unit})" for part in parts), *((mark,) if marks else ())),
        rows=tuple(
            (
                name,
                *(shown(row.get(part, 0.0), 3) for part in parts),
                *((shown(marks.get(name, math.nan), 3),) if marks else ()),
            )
            for name, row in rows
        ),
    )


def span_chart(
    bars: Sequence[tuple[str, float, float, str, str]],
    *,
    kinds: Mapping[str, str],
    key: str,
    title: str,
    label: str,
    axis: Axis | None = None,
    marks: Sequence[tuple[str, float, str, str]] = (),
) -> Chart:
    """Stretches of time in rows: (row, begin, end, kind, words). `marks` are moments: (row, when, kind, words).

    `kinds` are the colors; a legend names those that are there.
    """
    rows = list(dict.fromkeys([*(one[0] for one in bars), *(one[0] for one in marks)]))
    height = 90 + (_ROW_HEIGHT + 4) * len(rows)
    made = _figure(axis, label="", height=height, y_range=FactorRange(factors=[plain(one) for one in rows][::-1]))
    made.window_axis = "none"
    made.ygrid.grid_line_color = None
    made.xaxis.axis_label = label
    scale = axis.scale if axis is not None else 1.0
    for kind, color in kinds.items():
        of_kind = [one for one in bars if one[3] == kind]
        if of_kind:
            made.hbar(
                y="row",
                left="left",
                right="right",
                height=0.7,
                fill_color=color,
                line_color=color,
                source=ColumnDataSource(
                    {
                        "row": [plain(one[0]) for one in of_kind],
                        "left": _numbers([one[1] / scale for one in of_kind]),
                        "right": _numbers([one[2] / scale for one in of_kind]),
                        "words": [plain(one[4]) for one in of_kind],
                    }
                ),
                legend_label=plain(kind),
            )
        points = [one for one in marks if one[2] == kind]
        if points:
            made.scatter(
                x="left",
                y="row",
                marker="diamond",
                size=12,
                color=color,
                source=ColumnDataSource(
                    {
                        "row": [plain(one[0]) for one in points],
                        "left": _numbers([one[1] / scale for one in points]),
                        "words": [plain(one[3]) for one in points],
                    }
                ),
                legend_label=plain(kind),
            )
    if made.legend:
        _place_legend(made)
    made.add_tools(HoverTool(tooltips=[("", "@words")], **_HOVER))
    listed = sorted(
        [(one[1] / scale, one[2] / scale, one[0], one[4]) for one in bars]
        + [(one[1] / scale, one[1] / scale, one[0], one[3]) for one in marks]
    )
    return Chart(
        key=key,
        title=title,
        summary=f"{title}: {len(bars)} stretches and {len(marks)} moments in {len(rows)} rows.",
        figure=made,
        head=("from", "to", "what", ""),
        rows=some_of([(shown(a), shown(b), row, words[:200]) for a, b, row, words in listed], 60),
    )


def overlay_chart(
    curves: Sequence[tuple[str, Sequence[Point]]], *, key: str, title: str, unit: str, axis: Axis, scale: float = 1.0
) -> Chart:
    """The same quantity of several runs, one line over the other."""
    made = _figure(axis, label=unit)
    tables: list[tuple[float, str, float]] = []
    for place, (name, points) in enumerate(curves):
        source = ColumnDataSource(
            {
                "x": _numbers([axis.place(one.at) for one in points]),
                "mean": _numbers([one.mean / scale for one in points]),
            }
        )
        line = made.line(
            "x",
            "mean",
            source=source,
            color=COLORS[place],
            legend_label=plain(name),
            line_dash="solid" if place == 0 else "dashed",
            **_GLYPH,
        )
        tips = [(plain(name), "@mean{%.5g}"), (axis.label, "@x{%.6g}")]
        made.add_tools(
            HoverTool(
                renderers=[line],
                mode="vline",
                tooltips=tips,
                formatters={"@mean": "printf", "@x": "printf"},
                **_HOVER,
            )
        )
        tables.extend((axis.place(one.at), name, one.mean / scale) for one in points)
    _place_legend(made)
    last = "; ".join(f"{name} {shown(points[-1].mean / scale)}" for name, points in curves if points)
    return Chart(
        key=key,
        title=title,
        summary=f"{title}, at last: {last}{' ' + unit if unit else ''}.",
        figure=made,
        head=(axis.label, "run", f"{title} {unit}".strip()),
        rows=some_of([(shown(at, 6), name, shown(value, 5)) for at, name, value in sorted(tables)], 60),
    )


def plain(words: str) -> str:
    """Text that the library shows as it is: it takes `$$`, `\\(` and `\\[` for formulas, and loads a program for them."""
    return words.replace("$$", "$ $").replace("\\", "/")[:300]


def _unique(labels: list[str]) -> list[str]:
    """Rows of a chart need names of their own."""
    seen: dict[str, int] = {}
    found = []
    for one in labels:
        seen[one] = seen.get(one, 0) + 1
        found.append(one if seen[one] == 1 else f"{one} ({seen[one]})")
    return found


def drawn(charts: Sequence[Chart]) -> tuple[str, dict[str, str]]:
    """The program that draws them, and the place of each chart by its key."""
    if not charts:
        return "", {}
    page = Document()
    with page.models.freeze():  # or each chart has the library look at all of them
        for one in charts:
            page.add_root(one.figure)
    script, places = components({one.key: one.figure for one in charts}, wrap_script=False)
    return script, dict(places)


def library() -> str:
    """The program of the charts themselves."""
    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
