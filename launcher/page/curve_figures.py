"""Charts of numbers over time or over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource

from ..run_state.metric_table import Metric
from ..run_state.series import Curve, Point
from .chart import Chart, said, shown, some_of
from .figures import (
    BLUE,
    COLORS,
    RED,
    ChartAxis,
    add_hover,
    empty_figure,
    mark_starts,
    numbers,
    place_legend,
    plain,
)

_WIDTH = 1.6  # width of a line, in CSS pixels
_FEW_POINTS = 3  # a line of fewer points is not seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """The quantity of a chart. `key` names the chart in the page; `whose` is the source of the numbers: rank,
    host, or none.
    """

    key: str
    metric: Metric
    whose: str = ""

    @property
    def title(self) -> str:
        return self.metric.label

    @property
    def unit(self) -> str:
        return self.metric.unit.name

    def of(self, value: float) -> float:
        return value / self.metric.unit.scale

    def named(self, key: str) -> str:
        """Return the rank or host of the key, in brackets."""
        return f" ({self.whose} {key})" if self.whose and key else ""


def curve_chart(curve: Curve, quantity: Quantity, *, axis: ChartAxis) -> Chart:
    """Draw one quantity over time. Each of up to eight ranks or hosts has a line; more of them become the
    mean, and the band from the least to the greatest.
    """
    points = _with_gaps(curve.points())
    real = [one for one in points if not math.isnan(one.mean)]
    made = empty_figure(axis, label=quantity.unit)
    if quantity.metric.starts_at_zero:
        made.y_range.start = 0
    mark_starts(made, axis)
    data: dict[str, Any] = {
        "x": numbers([axis.place(one.at) for one in points]),
        "mean": numbers([quantity.of(one.mean) for one in points]),
    }
    tips = [("time", "@x{%.5g}")]
    if curve.has_lines:
        main = _draw_each(made, data, tips, points=points, quantity=quantity, keys=list(curve.keys))
    else:
        main = _draw_band(made, data, tips, points=points, quantity=quantity)
    _show_few(made, data["x"], data["mean"], color=BLUE)
    _show_flat(made, [quantity.of(one.mean) for one in real])
    add_hover(made, tips, renderers=[main], mode="vline")
    _mark_gaps(made, curve, axis)
    words = ("least", "mean", "greatest")
    return Chart(
        key=quantity.key,
        title=quantity.title,
        summary=_summary(quantity, real, curve),
        figure=made,
        head=(axis.label, *(f"{word} {quantity.unit}".strip() for word in words)),
        rows=some_of([_row(one, quantity, axis) for one in real]),
    )


def _draw_each(
    made: Any,
    data: dict[str, Any],
    tips: list[tuple[str, str]],
    *,
    points: Sequence[Point],
    quantity: Quantity,
    keys: Sequence[str],
) -> Any:
    """Draw a line for each source of the quantity; return the first one."""
    names = [f"{quantity.whose} {plain(key)}".strip() for key in keys]
    for place, key in enumerate(keys):
        data[f"each{place}"] = numbers([quantity.of(one.each.get(key, math.nan)) for one in points])
        tips.append((names[place], f"@each{place}{{%.5g}}"))
    source = ColumnDataSource(data)
    lines = [
        made.line(
            "x", f"each{place}", source=source, color=COLORS[place], legend_label=name, line_width=_WIDTH
        )
        for place, name in enumerate(names)
    ]
    place_legend(made)
    return lines[0]


def _draw_band(
    made: Any,
    data: dict[str, Any],
    tips: list[tuple[str, str]],
    *,
    points: Sequence[Point],
    quantity: Quantity,
) -> Any:
    """Draw the mean, and the band around it where the sources differ; return the line of the mean."""
    has_band = any(one.low != one.high for one in points if not math.isnan(one.mean))
    if not has_band:
        tips.append((quantity.unit or "value", "@mean{%.5g}"))
    else:
        tips.append(("mean", "@mean{%.5g}"))
        for column, word in (("high", "greatest"), ("low", "least")):
            data[column] = numbers([quantity.of(getattr(one, column)) for one in points])
            tips.append((word, f"@{column}{{%.5g}}"))
            if quantity.whose:
                data[f"{column}_key"] = [plain(getattr(one, f"{column}_key")) for one in points]
                tips.append((f"{word}: {quantity.whose}", f"@{column}_key"))
    source = ColumnDataSource(data)
    if has_band:
        made.varea("x", "low", "high", source=source, fill_color=BLUE, fill_alpha=0.25)
    return made.line("x", "mean", source=source, color=BLUE, line_width=_WIDTH)


def overlay_chart(curves: Sequence[tuple[str, Curve]], quantity: Quantity, *, axis: ChartAxis) -> Chart:
    """Draw the same quantity of several runs, one line over the other."""
    made = empty_figure(axis, label=quantity.unit)
    if quantity.metric.starts_at_zero:
        made.y_range.start = 0
    rows: list[tuple[float, str, float]] = []
    everything: list[float] = []
    for place, (name, curve) in enumerate(curves):
        points = curve.points()
        at = [axis.place(one.at) for one in points]
        means = [quantity.of(one.mean) for one in points]
        line = made.line(
            "x",
            "mean",
            source=ColumnDataSource({"x": numbers(at), "mean": numbers(means)}),
            color=COLORS[place],
            legend_label=plain(name),
            line_dash="solid" if place == 0 else "dashed",
            line_width=_WIDTH,
        )
        tips = [(plain(name), "@mean{%.5g}"), (axis.label, "@x{%.6g}")]
        add_hover(made, tips, renderers=[line], mode="vline")
        _show_few(made, numbers(at), numbers(means), color=COLORS[place])
        everything += means
        rows.extend(zip(at, [name] * len(at), means, strict=True))
        _mark_gaps(made, curve, axis)
    _show_flat(made, everything)
    place_legend(made)
    last = "; ".join(f"{name} {_last(quantity, curve.points(), curve)}" for name, curve in curves if curve)
    unit = f" {quantity.unit}" if quantity.unit else ""
    gaps = "".join(_gaps(name, curve) for name, curve in curves)
    return Chart(
        key=quantity.key,
        title=quantity.title,
        summary=f"{quantity.title}, at last: {last}{unit}.{gaps}",
        figure=made,
        head=(axis.label, "run", f"{quantity.title}{unit}"),
        rows=some_of([(shown(at, 6), name, shown(value, 5)) for at, name, value in sorted(rows)], 60),
    )


def _show_few(made: Any, x: Any, y: Any, *, color: str) -> None:
    """Draw points, where there are too few of them for a line."""
    if len(x) - np.isnan(y).sum() < _FEW_POINTS:
        made.scatter(x, y, color=color, size=6)


def _show_flat(made: Any, values: Sequence[float]) -> None:
    """Scale the axis so that a small constant number can be read: the library's is 2 high then."""
    drawn = numbers(values)
    if values and values[0] and np.isfinite(drawn).all() and np.ptp(drawn) == 0:
        made.y_range.default_span = 2 * abs(values[0])


def _mark_gaps(made: Any, curve: Curve, axis: ChartAxis) -> None:
    """Draw a line where a number was NaN or infinite."""
    if curve.gaps:
        gaps = numbers([axis.place(one) for one in curve.gaps])
        made.vspan(x=gaps, line_color=RED, line_width=2, line_alpha=0.7)


def _gaps(name: str, curve: Curve) -> str:
    """Describe the same in words."""
    if not curve.num_gaps:
        return ""
    times = "once" if curve.num_gaps == 1 else f"at {curve.num_gaps} times"
    return f" {name} was NaN or infinite {times}, shown as red lines."


def _last(quantity: Quantity, points: Sequence[Point], curve: Curve) -> str:
    """Return the last value of the curve: NaN, if that was reported last."""
    return shown(quantity.of(points[-1].mean)) if points and math.isfinite(curve.last) else said(curve.last)


def _with_gaps(points: Sequence[Point]) -> list[Point]:
    """Add a point without a value between attempts, so that no line joins them."""
    found: list[Point] = []
    for one in points:
        if found and found[-1].attempt != one.attempt:
            nowhere: dict[str, Any] = {
                "low": math.nan,
                "mean": math.nan,
                "high": math.nan,
                "low_key": "",
                "high_key": "",
            }
            found.append(one._replace(each={}, **nowhere))
        found.append(one)
    return found


def _row(one: Point, quantity: Quantity, axis: ChartAxis) -> tuple[str, ...]:
    return (
        shown(axis.place(one.at)),
        shown(quantity.of(one.low)) + quantity.named(one.low_key),
        shown(quantity.of(one.mean)),
        shown(quantity.of(one.high)) + quantity.named(one.high_key),
    )


def _summary(quantity: Quantity, points: Sequence[Point], curve: Curve) -> str:
    """Write a sentence for readers who do not see the chart."""
    text = f"{quantity.title}: no number."
    if points:
        low, high = min(points, key=lambda one: one.low), max(points, key=lambda one: one.high)
        text = (
            f"{quantity.title}: {shown(quantity.of(points[0].mean))} at first, "
            f"{_last(quantity, points, curve)} at last; least {shown(quantity.of(low.low))}"
            f"{quantity.named(low.low_key)}, greatest {shown(quantity.of(high.high))}"
            f"{quantity.named(high.high_key)}{' ' + quantity.unit if quantity.unit else ''}."
        )
    return text + _gaps("It", curve)
