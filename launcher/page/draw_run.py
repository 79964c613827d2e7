"""The charts of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..run_state.attempt import AttemptState
from ..run_state.metric_table import (
    BYTES,
    OF_HOSTS,
    OTHER_LABEL,
    PAUSE,
    PHASES,
    RANK,
    WAITING,
    Metric,
    names_of,
)
from ..run_state.rank_state import FOLDED
from . import figures
from .chart import Chart, by_number, time_unit
from .curve_figures import Quantity, curve_chart
from .curves import MEMORY_PARTS, REST
from .part_figures import PartNames, Stretch, bar_chart, span_chart, stack_chart
from .run import Run

MAX_BARS = 64
MAX_ATTEMPTS = 30  # attempts on one time line of starts
MAX_MARKS = 200
WARNING = 30  # the level of a note

PHASE_NAMES = {**{f"{name}_s": one.label for name, one in PHASES.items()}, REST: OTHER_LABEL}
_NOT_OWN = names_of(WAITING, PAUSE)
MEMORY_NAMES = {**MEMORY_PARTS, "unknown": "not told by kind"}
_STRETCHES = {
    "starting": figures.BROWN,
    "running": figures.BLUE,
    "ended well": figures.GREEN,
    "failed": figures.RED,
    "stopped": figures.PURPLE,
    "saving": figures.TEAL,
    "loading": figures.TEAL,
    "evaluating": figures.PINK,
    "generating": figures.PINK,
    "state": figures.GREY,
    "straggler": figures.ORANGE,
    "hang": figures.RED,
    "stacks": figures.PURPLE,
    "warning": figures.BROWN,
    "error": figures.RED,
}


class RunCharts:
    """The charts of one run, all with one axis of time."""

    def __init__(self, run: Run) -> None:
        self._run, self._curves, self._began_at = run, run.curves, run.state.began_at
        starts = [one.began_at - self._began_at for one in run.attempts][1:MAX_MARKS]
        unit = time_unit(max(run.duration_s, run.state.at - self._began_at))
        self._axis = figures.time_axis(unit, starts)

    def _curve(self, name: str, *, whose: str = "rank") -> Chart:
        quantity = Quantity(key=f"curve-{name}", metric=RANK.get(name, Metric(name)), whose=whose)
        return curve_chart(self._curves.over_time[name], quantity, axis=self._axis)

    def _section(self, key: str, *, whose: str = "rank") -> list[Chart]:
        """Return the charts over time of a section of the page."""
        curves = self._curves.over_time
        names = [name for name, one in RANK.items() if one.section == key and one.label and curves.get(name)]
        return [self._curve(name, whose=whose) for name in names]

    def training(self) -> list[Chart]:
        """Return the charts of the program's own numbers, over time."""
        curves = self._curves.over_time
        found = self._section("training")
        if curves.get("skipped") and not any(one.high for one in curves["skipped"].points()):
            found = [one for one in found if one.key != "curve-skipped"]
        return found + [self._curve(name) for name in curves if name not in RANK]

    def output(self) -> list[Chart]:
        """Return the charts of the ranks' output."""
        return self._section("output", whose="")

    def times(self) -> list[Chart]:
        """Return the charts of the parts of a step: over time, and of each rank."""
        found = []
        points = list(self._curves.shares.points())
        if any(any(row.values()) for _, _, row in points):
            names = PartNames("phases", "A step by phase, mean of all ranks", "s per step", PHASE_NAMES)
            found.append(stack_chart(points, names, axis=self._axis))
        found += self._section("times")
        rows = self._phases_by_rank()
        if rows:
            names = PartNames("phases-by-rank", self._whose("A step by rank"), "s per step", PHASE_NAMES)
            found.append(bar_chart(rows, names))
        return found

    def _phases_by_rank(self) -> list[tuple[str, dict[str, float]]]:
        rows = [
            (key, {name: value / one.steps for name, value in one.seconds.items() if name != "step_s"})
            for key, one in self._curves.totals.items()
            if one.steps > 0 and any(one.seconds.values())
        ]
        own = {key: sum(value for name, value in row.items() if name not in _NOT_OWN) for key, row in rows}
        return self._named(_most(rows, own))

    def memory(self) -> list[Chart]:
        """Return the charts of ranks' memory: by kind in the last report, the greatest, and over time."""
        found = []
        rows: list[tuple[str, dict[str, float]]] = []
        peaks: dict[str, float] = {}
        for key, one in self._curves.totals.items():
            kinds = {name: one.memory[name] / BYTES.scale for name in MEMORY_PARTS if name in one.memory}
            used = one.memory.get("mem_used", 0.0) / BYTES.scale
            kinds["unknown"] = max(0.0, used - sum(kinds.values()))
            if sum(kinds.values()):
                rows.append((key, kinds))
                peaks[key] = one.peak / BYTES.scale
        if rows:
            chosen = _most(rows, peaks)
            names = PartNames("memory", self._whose("Memory by rank, as told last"), BYTES.name, MEMORY_NAMES)
            marks = {self._name_of(key): peaks[key] for key, _ in chosen}
            found.append(bar_chart(self._named(chosen), names, marks=marks, mark="the most there was"))
        return found + self._section("memory")

    def _named(self, rows: Sequence[tuple[str, Mapping[str, float]]]) -> list[tuple[str, dict[str, float]]]:
        """Return the rows with the host of each rank, in the order of ranks."""
        ordered = sorted(rows, key=lambda one: (one[0].endswith(FOLDED), by_number(one[0])))
        return [(self._name_of(key), dict(row)) for key, row in ordered]

    def _name_of(self, key: str) -> str:
        """Return the name of a rank, or of the ranks of a host, in a chart."""
        if key.endswith(FOLDED):
            return key.removesuffix(FOLDED)
        rank = self._run.state.ranks.get(int(key))
        return f"rank {key}, {rank.host}" if rank is not None else f"rank {key}"

    def _whose(self, title: str) -> str:
        num = len(self._curves.totals)
        if any(key.endswith(FOLDED) for key in self._curves.totals):
            title = title.replace("by rank", "by host, mean of its ranks")
        return f"{title}: the {MAX_BARS} greatest of {num}" if num > MAX_BARS else title

    def hosts(self) -> list[Chart]:
        """Return the charts of hosts, over time."""
        found = []
        for name, metric in OF_HOSTS.items():
            curve = self._curves.of_hosts.get(name)
            if curve:
                quantity = Quantity(
                    key=f"host-{name}", metric=metric, whose="" if curve.has_lines else "host"
                )
                found.append(curve_chart(curve, quantity, axis=self._axis))
        return found

    def time_line(self) -> list[Chart]:
        """Return the chart of begin and end of each attempt, with the events between."""
        found = _attempts(self._run) + _states(self._run) + _moments(self._run)
        if not found:
            return []
        return [
            span_chart(found, PartNames("time-line", "The run over time", "", _STRETCHES), axis=self._axis)
        ]

    def starts(self) -> list[Chart]:
        """Return the chart of the phases of each start, each from the end of the one before."""
        found: list[Stretch] = []
        kinds: dict[str, str] = {}
        for one in self._run.attempts[-MAX_ATTEMPTS:]:
            begin = 0.0
            for phase, at in sorted(one.phases, key=lambda phase: phase.ended_at):
                kinds.setdefault(phase, figures.COLORS[len(kinds) % len(figures.COLORS)])
                end = max(begin, at - one.began_at)
                words = f"{phase}: {end - begin:.2f} s, until {end:.2f} s"
                found.append(Stretch(f"attempt {one.number + 1}", begin, end, phase, words))
                begin = end
        if not found:
            return []
        return [
            span_chart(
                found, PartNames("starts", "Phases of each start", "seconds since the attempt began", kinds)
            )
        ]


def _attempts(run: Run) -> list[Stretch]:
    """Return each attempt: its start, and what followed."""
    found = []
    for one in run.attempts[-MAX_ATTEMPTS:]:
        row, kind = f"attempt {one.number + 1}", how_ended(one)
        began, running = one.began_at - run.state.began_at, one.running_at - run.state.began_at
        ended = max(one.ended_at, one.last_at, one.began_at) - run.state.began_at
        if one.running_at:
            found.append(Stretch(row, began, min(ended, running), "starting", f"{row} starts"))
            found.append(Stretch(row, min(ended, running), ended, kind, f"{row}: {kind}"))
        else:
            kind = "starting" if one.verdict is None else kind
            found.append(Stretch(row, began, ended, kind, f"{row}: {kind}"))
    return found


def _states(run: Run) -> list[Stretch]:
    """Return the states of ranks besides training."""
    return [
        Stretch("states of ranks", begin, end, state if state in _STRETCHES else "state", state)
        for begin, end, state in run.curves.states
    ]


def _moments(run: Run) -> list[Stretch]:
    """Return stragglers, hangs, questions for stacks, warnings and errors."""
    state, found = run.state, []

    def add(row: str, at: float, kind: str, words: str, over_at: float = 0.0) -> None:
        begin, end = at - state.began_at, max(at, over_at) - state.began_at
        found.append(Stretch(row, begin, end, kind, words[:200]))

    for straggler in list(state.stragglers)[:MAX_MARKS]:
        add("stragglers", straggler.at, "straggler", straggler.text, straggler.over_at)
    for report in state.hangs:
        add("hangs", report.at, "hang", f"rank {report.rank} told of a hang")
    for report in state.stacks:
        add("stacks", report.at, "stacks", report.title)
    for note in [one for one in state.notes if one.level >= WARNING][:MAX_MARKS]:
        add("warnings and errors", note.at, "error" if note.level > WARNING else "warning", note.text)
    return found


def how_ended(one: AttemptState) -> str:
    """Describe the end in one or two words."""
    if one.verdict is None:
        return "running"
    if one.verdict.keys.get("interrupted_by") or one.verdict.keys.get("change"):
        return "stopped"
    return "failed" if one.verdict.exit_code else "ended well"


def _most(
    rows: Sequence[tuple[str, Mapping[str, float]]], by: Mapping[str, float]
) -> list[tuple[str, Mapping[str, float]]]:
    """Return at most so many rows as can be read: the largest."""
    return sorted(rows, key=lambda one: -by[one[0]])[:MAX_BARS]
