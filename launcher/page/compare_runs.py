"""The differences of two runs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from ..inputs.host_list import folded
from ..run_state.metric_table import BYTES, RANK, Metric
from ..run_state.series import Point
from ..wording import shown_time
from . import figures
from .chart import Chart, said, shown, time_unit
from .curve_figures import Quantity, overlay_chart
from .run import Run
from .tell_run import differences, mean_rate, shown_steps, state_of

MAX_STEPS = 40  # rows of the table of equal steps
MAX_KEYS = 500
_OVER_TIME = ("steps_per_s", "step_s", "loss", "lines_per_s")
_OF_JOB = {"dslaunch": "version", "launcher": "launcher", "in folder": "cwd", "user": "user"}


class RunComparison:
    """Run `a` beside run `b`."""

    def __init__(self, a: Run, b: Run) -> None:
        self._runs = (a, b)
        names = [run.name for run in self._runs]
        if names[0] == names[1]:
            names = [run.label for run in self._runs]
        self.names = (names[0], names[1]) if names[0] != names[1] else (f"{names[0]} (A)", f"{names[1]} (B)")

    def summary(self) -> list[tuple[str, str, str]]:
        rows = (
            ("how it is", [state_of(run)[0] for run in self._runs]),
            ("time", [shown_time(run.duration_s) for run in self._runs]),
            ("hosts", [str(len(run.hosts)) if run.last_attempt else "" for run in self._runs]),
            ("ranks", [str(run.num_ranks or "") for run in self._runs]),
            ("attempts", [str(run.state.num_attempts) for run in self._runs]),
            ("steps", [shown_steps(run) for run in self._runs]),
            ("steps a second, mean", [shown(mean_rate(run), 4) for run in self._runs]),
            ("seconds a step, mean", [_step_s(run) for run in self._runs]),
            ("last loss", [_last_loss(run) for run in self._runs]),
            ("least loss", [_least(run) for run in self._runs]),
            ("memory, most of a rank (GiB)", [_memory(run) for run in self._runs]),
        )
        return [(name, values[0], values[1]) for name, values in rows if any(values)]

    def differences(self) -> list[tuple[str, str, str]]:
        """Return command, versions, hosts, and keys of the configuration, if they differ."""
        rows: list[tuple[str, ...]] = [
            ("command", *(shlex.join(run.state.job.command) for run in self._runs)),
            *((name, *(getattr(run.state.job, key) for run in self._runs)) for name, key in _OF_JOB.items()),
            ("hosts", *(folded(run.hosts) for run in self._runs)),
            ("ranks", *(str(run.num_ranks) for run in self._runs)),
        ]
        found = [(name, left, right) for name, left, right in rows if left != right]
        configs = [_config(run) for run in self._runs]
        keys = differences(*configs)
        found.extend((f"config: {name}", left, right) for name, left, right in keys[:MAX_KEYS])
        return found

    def over_steps(self) -> list[Chart]:
        """Return the curves of both over steps."""
        axis = figures.ChartAxis("step")
        found = []
        for name in self._common():
            curves = [(who, run.curves.over_steps[name]) for who, run in self._named()]
            if name == "skipped" and not any(one.high for _, curve in curves for one in curve.points()):
                continue
            quantity = Quantity(key=f"step-{name}", metric=RANK.get(name, Metric(name)))
            found.append(overlay_chart(curves, quantity, axis=axis))
        return found

    def over_time(self) -> list[Chart]:
        """Return the curves that depend on the time and not on the step."""
        axis = figures.time_axis(time_unit(max(run.duration_s for run in self._runs)), ())
        found = []
        for name in _OVER_TIME:
            if all(run.curves.over_time.get(name) for run in self._runs):
                curves = [(who, run.curves.over_time[name]) for who, run in self._named()]
                quantity = Quantity(key=f"time-{name}", metric=RANK[name])
                found.append(overlay_chart(curves, quantity, axis=axis))
        return found

    def at_equal_steps(self) -> Iterator[tuple[str, list[tuple[str, str, str, str]]]]:
        """Return both runs' numbers of the same steps, by name."""
        for name in self._common():
            a, b = (run.curves.over_steps[name].points() for run in self._runs)
            if not a or not b:
                continue
            first, last = max(a[0].at, b[0].at), min(a[-1].at, b[-1].at)
            if first > last:
                continue
            steps = [first + (last - first) * place / (MAX_STEPS - 1) for place in range(MAX_STEPS)]
            rows = []
            for step in dict.fromkeys(round(one) for one in steps):
                left, right = value_at(a, step), value_at(b, step)
                rows.append((str(step), shown(left, 6), shown(right, 6), shown(right - left, 3)))
            yield name, rows

    def _common(self) -> list[str]:
        a, b = (run.curves.over_steps for run in self._runs)
        return [
            name for name in (*RANK, *(one for one in a if one not in RANK)) if a.get(name) and b.get(name)
        ]

    def _named(self) -> Iterator[tuple[str, Run]]:
        return zip(self.names, self._runs, strict=True)


def value_at(points: Sequence[Point], step: float) -> float:
    """Interpolate between two points on a straight line; NaN outside."""
    before = None
    for one in points:
        if one.at == step:
            return one.mean
        if one.at > step:
            if before is None:
                return math.nan
            share = (step - before.at) / (one.at - before.at)
            return before.mean + share * (one.mean - before.mean)
        before = one
    return math.nan


def _config(run: Run) -> Any:
    configs = run.state.configs
    return configs[min(configs)] if configs else {}


def _last_loss(run: Run) -> str:
    last = run.state.last_loss
    return "" if last is None else shown(last, 6) if math.isfinite(last) else said(last)


def _least(run: Run) -> str:
    curve = run.curves.over_time.get("loss")
    points = curve.points() if curve else []
    return shown(min(one.mean for one in points), 6) if points else ""


def _step_s(run: Run) -> str:
    """Mean of all steps: a slow one counts as one, however few were reported with it."""
    steps = sum(one.steps for one in run.curves.totals.values())
    seconds = sum(one.seconds.get("step_s", 0.0) for one in run.curves.totals.values())
    return shown(seconds / steps, 4) if steps else ""


def _memory(run: Run) -> str:
    peak = max((one.peak for one in run.curves.totals.values()), default=0.0)
    return shown(peak / BYTES.scale, 4) if peak else ""
