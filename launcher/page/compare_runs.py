"""In what two runs differ."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence

from ..inputs.host_list import folded
from ..run_state.values import text, texts
from ..wording import shown_time
from . import figures
from .chart import Chart, said, shown, time_unit
from .curve_figures import Quantity, overlay_chart
from .draw_run import FROM_ZERO, TRAINING
from .run import Run
from .series import Point
from .tell_run import differences, mean_rate, shown_steps, state_of

MAX_STEPS = 40  # rows of the table of equal steps
MAX_KEYS = 500
_OF_JOB = {"dslaunch": "version", "launcher": "launcher", "in folder": "cwd", "user": "user"}


class Comparison:
    """Run `a` beside run `b`."""

    def __init__(self, a: Run, b: Run) -> None:
        self._runs = (a, b)
        names = [str(run.job.get("name") or run.label) for run in self._runs]
        if names[0] == names[1]:
            names = [run.label for run in self._runs]
        self.names = (names[0], names[1]) if names[0] != names[1] else (f"{names[0]} (A)", f"{names[1]} (B)")

    def summary(self) -> list[tuple[str, str, str]]:
        rows = (
            ("how it is", [state_of(run)[0] for run in self._runs]),
            ("time", [shown_time(run.duration_s) for run in self._runs]),
            ("hosts", [str(len(run.last_attempt.hosts)) if run.last_attempt else "" for run in self._runs]),
            ("ranks", [str(run.num_ranks or "") for run in self._runs]),
            ("attempts", [str(len(run.attempts)) for run in self._runs]),
            ("steps", [shown_steps(run) for run in self._runs]),
            ("steps a second, mean", [shown(mean_rate(run), 4) for run in self._runs]),
            ("seconds a step, mean", [_step_s(run) for run in self._runs]),
            ("last loss", [_last_loss(run) for run in self._runs]),
            ("least loss", [_least(run) for run in self._runs]),
            ("memory, most of a rank (GiB)", [_memory(run) for run in self._runs]),
        )
        return [(name, values[0], values[1]) for name, values in rows if any(values)]

    def differences(self) -> list[tuple[str, str, str]]:
        """Command, versions, hosts, and keys of the configuration; only what is not equal."""
        a, b = self._runs
        rows: list[tuple[str, ...]] = [
            ("command", *(shlex.join(texts(run.job.get("command"))) for run in self._runs)),
            *((name, text(a.job.get(key)), text(b.job.get(key))) for name, key in _OF_JOB.items()),
            ("hosts", *(_hosts(run) for run in self._runs)),
            ("ranks", *(str(run.num_ranks) for run in self._runs)),
        ]
        found = [(name, left, right) for name, left, right in rows if left != right]
        configs = [run.configs[min(run.configs)] if run.configs else {} for run in self._runs]
        keys = differences(*configs)
        found.extend((f"config: {name}", left, right) for name, left, right in keys[:MAX_KEYS])
        return found

    def over_steps(self) -> list[Chart]:
        """The curves of both over steps."""
        axis = figures.Axis("step")
        found = []
        for name in self._common("by_step"):
            title, unit = TRAINING.get(name, (name, ""))
            curves = [(who, run.by_step[name]) for who, run in self._named()]
            if name == "skipped" and not any(one.high for _, curve in curves for one in curve.points()):
                continue
            quantity = Quantity(key=f"step-{name}", title=title, unit=unit, from_zero=name in FROM_ZERO)
            found.append(overlay_chart(curves, quantity, axis=axis))
        return found

    def over_time(self) -> list[Chart]:
        """What depends on the time and not on the step."""
        axis = figures.time_axis(time_unit(max(run.duration_s for run in self._runs)), ())
        found = []
        for name, title, unit in (
            ("rate", "Rate", "steps/s"),
            ("step_s", "Time of a step", "s"),
            ("loss", "Loss", ""),
            ("lines", "Lines of output", "lines/s"),
        ):
            if all(run.curves.get(name) for run in self._runs):
                curves = [(who, run.curves[name]) for who, run in self._named()]
                quantity = Quantity(key=f"time-{name}", title=title, unit=unit, from_zero=name != "loss")
                found.append(overlay_chart(curves, quantity, axis=axis))
        return found

    def at_equal_steps(self) -> Iterator[tuple[str, list[tuple[str, str, str, str]]]]:
        """What both told of the same steps, by name."""
        for name in self._common("by_step"):
            a, b = (run.by_step[name].points() for run in self._runs)
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

    def _common(self, kind: str) -> list[str]:
        a, b = (getattr(run, kind) for run in self._runs)
        names = [name for name in TRAINING if a.get(name) and b.get(name)]
        return names + [name for name in a if name not in TRAINING and a.get(name) and b.get(name)]

    def _named(self) -> Iterator[tuple[str, Run]]:
        return zip(self.names, self._runs, strict=True)


def value_at(points: Sequence[Point], step: float) -> float:
    """Between two points on the line that joins them; NaN outside."""
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


def _hosts(run: Run) -> str:
    return folded(run.last_attempt.hosts) if run.last_attempt else ""


def _last_loss(run: Run) -> str:
    last = run.last_loss
    return "" if last is None else shown(last, 6) if math.isfinite(last) else said(last)


def _least(run: Run) -> str:
    curve = run.curves.get("loss")
    points = curve.points() if curve else []
    return shown(min(one.mean for one in points), 6) if points else ""


def _step_s(run: Run) -> str:
    """Mean of all steps: a slow one counts as one, however few were told with it."""
    steps = sum(one.steps for one in run.totals.values())
    seconds = sum(one.seconds.get("step_s", 0.0) for one in run.totals.values())
    return shown(seconds / steps, 4) if steps else ""


def _memory(run: Run) -> str:
    peak = max((one.peak for one in run.totals.values()), default=0.0)
    return shown(peak / (1 << 30), 4) if peak else ""
