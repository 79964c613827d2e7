"""The common parts of charts. This file, `curve_figures.py` and `part_figures.py` know the library, Bokeh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.embed import components
from bokeh.models import (
    BasicTickFormatter,
    BoxZoomTool,
    CrosshairTool,
    DataRange1d,
    HoverTool,
    ResetTool,
    SaveTool,
)
from bokeh.models.annotations import Span
from bokeh.plotting import figure
from bokeh.resources import Resources

from .chart import Chart, TimeUnit

# All contrast with a white and with a dark background by a factor of 3 at least.
BLUE, ORANGE, GREEN, RED = "#2f7ed8", "#cf6a0c", "#2e9a58", "#d9484d"
PURPLE, TEAL, PINK, BROWN = "#955be0", "#1b95a3", "#cf4698", "#9c7618"
COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, TEAL, PINK, BROWN)
GREY = "#7d8590"
HEIGHT = 230  # CSS pixels


class ChartAxis:
    """The horizontal axis of charts: they are zoomed together, and a line marks the pointer in all."""

    def __init__(
        self, label: str, *, scale: float = 1.0, starts: Sequence[float] = (), noun: str = "time"
    ) -> None:
        """`scale` divides the drawn values. `starts` are the begins of attempts, before that. `noun` stands
        at the pointer.
        """
        self.label, self.scale, self.noun = label, scale, noun
        self.range: Any = DataRange1d(range_padding=0.01)
        self.line = Span(dimension="height", line_color=GREY, line_width=1)
        self.starts = [one / scale for one in starts]

    def place(self, value: float) -> float:
        return value / self.scale


def time_axis(unit: TimeUnit, starts: Sequence[float]) -> ChartAxis:
    """Return an axis of seconds since the start."""
    return ChartAxis(f"time since the start ({unit.name})", scale=unit.seconds, starts=starts)


def empty_figure(axis: ChartAxis | None, *, label: str, height: int = HEIGHT, **given: Any) -> Any:
    """Return an empty chart; `label` stands beside its vertical axis."""
    zoom = BoxZoomTool(dimensions="both" if axis is None else "width")
    tools: list[Any] = [zoom, ResetTool(), SaveTool()]
    if axis is not None:
        given["x_range"] = axis.range
        tools.append(CrosshairTool(dimensions="height", overlay=axis.line))
    made: Any = figure(
        height=height,
        min_width=200,
        sizing_mode="stretch_width",
        tools=tools,
        active_drag=zoom,
        toolbar_location="right",
        background_fill_alpha=0.0,
        border_fill_alpha=0.0,
        outline_line_color=None,
        **given,
    )
    made.toolbar.logo = None
    made.toolbar.autohide = True
    made.xaxis.axis_label = None if axis is None else axis.label
    made.yaxis.axis_label = label or None
    if "y_range" not in given:
        made.yaxis.formatter = BasicTickFormatter(power_limit_high=7)
    for one in (*made.xaxis, *made.yaxis):
        one.axis_label_text_font_style = "normal"
        one.minor_tick_line_color = None
    if axis is not None:
        made.window_axis = "x"  # the visible part decides how high the chart reaches
    return made


def mark_starts(made: Any, axis: ChartAxis) -> None:
    """Draw a line at the begin of an attempt."""
    if axis.starts:
        made.vspan(x=numbers(axis.starts), line_color=GREY, line_dash="dotted", line_width=1)


def add_hover(made: Any, tips: Sequence[tuple[str, str]], **given: Any) -> None:
    """Add a text at the pointer. A tip with a format in braces has that of printf."""
    formats: Any = {tip.partition("{")[0]: "printf" for _, tip in tips if "{" in tip}
    made.add_tools(
        HoverTool(tooltips=list(tips), formatters=formats, attachment="vertical", show_arrow=False, **given)
    )


def place_legend(made: Any) -> None:
    """Put the legend above the chart, where it hides nothing; a click on a name hides its line."""
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


def numbers(values: Sequence[float]) -> Any:
    """Return the numbers with seven digits, which saves bytes."""
    with np.errstate(over="ignore"):
        return np.array(values, dtype=np.float64).astype(np.float32)


def plain(words: str) -> str:
    """Return text that the library shows unchanged: it takes `$$`, `\\(` and `\\[` for formulas, and would
    load a program that draws them.
    """
    return words.replace("$$", "$ $").replace("\\", "/")[:300]


def drawn(charts: Sequence[Chart]) -> tuple[str, dict[str, str]]:
    """Return the program that draws them, and the HTML of each one's place by its key."""
    if not charts:
        return "", {}
    page = Document()
    with page.models.freeze():  # otherwise each chart has the library look at all of them
        for one in charts:
            page.add_root(one.figure)
    script, places = components({one.key: one.figure for one in charts}, wrap_script=False)
    return script, dict(places)


def library() -> str:
    """Return the source of Bokeh's JavaScript, which draws the charts."""
    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
