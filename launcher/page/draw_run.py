"""Which charts a run has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import figures
from .chart import Chart, by_number, time_unit
from .curve_figures import Quantity, curve_chart
from .part_figures import Names, Stretch, bar_chart, span_chart, stack_chart
from .run import FOLDED, MEMORY_KINDS, Attempt, Run

MAX_BARS = 64
MAX_ATTEMPTS = 30  # on one time line of starts
MAX_MARKS = 200
WARNING = 30  # the level of a note
GIB = float(1 << 30)
MIB = float(1 << 20)

PHASE_NAMES = {
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimizer",
    "comm_s": "waiting for others",
    "data_s": "data",
    "paused_s": "saving, loading, evaluating",
    "rest": "other",
}
MEMORY_NAMES = {
    "mem_parameters": "parameters",
    "mem_gradients": "gradients",
    "mem_optimizer": "optimizer states",
    "mem_activations": "activations",
    "mem_other": "other, by kind",
    "unknown": "not told by kind",
}
TRAINING = {
    "loss": ("Loss", ""),
    "lr": ("Learning rate", ""),
    "grad_norm": ("Gradient norm", ""),
    "rate": ("Rate", "steps/s"),
    "tokens": ("Tokens", "tokens/s"),
    "samples": ("Samples", "samples/s"),
    "loss_scale": ("Loss scale", ""),
    "skipped": ("Steps skipped so far", ""),
}
HOST_CHARTS = {
    "cpu": ("Processors in use", "%", 0.01),
    "load1": ("Load, over a minute", "", 1.0),
    "mem_used": ("Memory in use", "GiB", GIB),
    "net_in": ("Network, in", "MiB/s", MIB),
    "net_out": ("Network, out", "MiB/s", MIB),
    "net_wait": ("Data wait for the network, of the time", "%", 0.01),
    "disk_read": ("Disks, read", "MiB/s", MIB),
    "disk_write": ("Disks, written", "MiB/s", MIB),
    "gpu_util": ("GPUs in use, mean of a host", "%", 0.01),
    "gpu_mem": ("GPU memory in use, the fullest of a host", "GiB", GIB),
    "gpu_power": ("GPU power, sum of a host", "W", 1.0),
    "gpu_temp": ("GPU temperature, the hottest of a host", "°C", 1.0),
}
_NO_CURVES = frozenset((*TRAINING, "step", "step_s", "own_s", "lines", "mem_used", "mem_peak"))
_STRETCHES = {
    "starting": figures.BROWN,
    "running": figures.BLUE,
    "ended well": figures.GREEN,
    "failed": figures.RED,
    "stopped": figures.PURPLE,
    "saving": figures.TEAL,
    "loading": figures.TEAL,
    "evaluating": figures.PINK,
    "state": figures.GREY,
    "straggler": figures.ORANGE,
    "hang": figures.RED,
    "stacks": figures.PURPLE,
    "warning": figures.BROWN,
    "error": figures.RED,
}
FROM_ZERO = frozenset(("rate", "tokens", "samples", "lines", "step_s", "own_s", "skipped"))


class RunCharts:
    """The charts of one run, all with one axis of time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        starts = [one.began_at - run.began_at for _, one in sorted(run.attempts.items())][1:MAX_MARKS]
        unit = time_unit(max(run.duration_s, run.last_at - run.began_at))
        self._axis = figures.time_axis(unit, starts)

    def _curve(
        self, name: str, title: str, unit: str = "", *, scale: float = 1.0, whose: str = "rank"
    ) -> Chart:
        quantity = Quantity(
            key=f"curve-{name}",
            title=title,
            unit=unit,
            scale=scale,
            whose=whose,
            from_zero=name in FROM_ZERO,
        )
        steps = self._run.curves.get("step")
        return curve_chart(self._run.curves[name], quantity, axis=self._axis, steps=steps)

    def training(self) -> list[Chart]:
        """What the program tells, over time."""
        curves = self._run.curves
        there = [name for name in TRAINING if curves.get(name)]
        if "skipped" in there and not any(one.high for one in curves["skipped"].points()):
            there.remove("skipped")
        found = [self._curve(name, *TRAINING[name]) for name in there]
        return found + [self._curve(name, name) for name in curves if name not in _NO_CURVES]

    def output(self) -> list[Chart]:
        """How much ranks write."""
        if not self._run.curves.get("lines"):
            return []
        return [self._curve("lines", "Lines of output, of all ranks", "lines/s", whose="")]

    def times(self) -> list[Chart]:
        """What a step is made of: over time, and of each rank."""
        run, found = self._run, []
        points = list(run.shares.points())
        if any(any(row.values()) for _, _, row in points):
            names = Names("phases", "A step by phase, mean of all ranks", "s per step", PHASE_NAMES)
            found.append(stack_chart(points, names, axis=self._axis))
        if run.curves.get("step_s"):
            found.append(self._curve("step_s", "Time of a step", "s"))
        if run.curves.get("own_s"):
            found.append(self._curve("own_s", "Of that, not waiting for others", "s"))
        rows = self._phases_by_rank()
        if rows:
            names = Names("phases-by-rank", self._whose("A step by rank"), "s per step", PHASE_NAMES)
            found.append(bar_chart(rows, names))
        return found

    def _phases_by_rank(self) -> list[tuple[str, dict[str, float]]]:
        rows = [
            (key, {name: value / one.steps for name, value in one.seconds.items() if name != "step_s"})
            for key, one in self._run.totals.items()
            if one.steps > 0 and any(one.seconds.values())
        ]
        own = {
            key: sum(row.values()) - row.get("comm_s", 0.0) - row.get("paused_s", 0.0) for key, row in rows
        }
        return self._named(_most(rows, own))

    def memory(self) -> list[Chart]:
        """Of ranks: by kind as told last, the greatest there was, and over time."""
        run, found = self._run, []
        rows: list[tuple[str, dict[str, float]]] = []
        peaks: dict[str, float] = {}
        for key, one in run.totals.items():
            kinds = {name: one.memory[name] / GIB for name in MEMORY_KINDS if name in one.memory}
            used = one.memory.get("mem_used", 0.0) / GIB
            kinds["unknown"] = max(0.0, used - sum(kinds.values()))
            if sum(kinds.values()):
                rows.append((key, kinds))
                peaks[key] = one.peak / GIB
        if rows:
            chosen = _most(rows, peaks)
            names = Names("memory", self._whose("Memory by rank, as told last"), "GiB", MEMORY_NAMES)
            marks = {self._name_of(key): peaks[key] for key, _ in chosen}
            found.append(bar_chart(self._named(chosen), names, marks=marks, mark="the most there was"))
        if run.curves.get("mem_used"):
            found.append(self._curve("mem_used", "Memory in use", "GiB", scale=GIB))
        return found

    def _named(self, rows: Sequence[tuple[str, Mapping[str, float]]]) -> list[tuple[str, dict[str, float]]]:
        """With the host of each rank; in the order of ranks."""
        ordered = sorted(rows, key=lambda one: (one[0].endswith(FOLDED), by_number(one[0])))
        return [(self._name_of(key), dict(row)) for key, row in ordered]

    def _name_of(self, key: str) -> str:
        """What a rank, or the ranks of a host, are called in a chart."""
        if key.endswith(FOLDED):
            return key.removesuffix(FOLDED)
        last = self._run.last_attempt
        host = last.host_of.get(int(key)) if last else None
        return f"rank {key}, {host}" if host else f"rank {key}"

    def _whose(self, title: str) -> str:
        num = len(self._run.totals)
        if any(key.endswith(FOLDED) for key in self._run.totals):
            title = title.replace("by rank", "by host, mean of its ranks")
        return f"{title}: the {MAX_BARS} greatest of {num}" if num > MAX_BARS else title

    def hosts(self) -> list[Chart]:
        """How hosts do, over time."""
        found = []
        for name, (title, unit, scale) in HOST_CHARTS.items():
            curve = self._run.hosts_curves.get(name)
            if curve:
                whose = "" if curve.has_lines else "host"
                quantity = Quantity(
                    key=f"host-{name}", title=title, unit=unit, scale=scale, whose=whose, from_zero=True
                )
                found.append(curve_chart(curve, quantity, axis=self._axis))
        return found

    def time_line(self) -> list[Chart]:
        """When each attempt began and ended, and what was seen meanwhile."""
        found = _attempts(self._run) + _states(self._run) + _moments(self._run)
        if not found:
            return []
        return [span_chart(found, Names("time-line", "The run over time", "", _STRETCHES), axis=self._axis)]

    def starts(self) -> list[Chart]:
        """The phases of each start, each from the end of the one before."""
        found: list[Stretch] = []
        kinds: dict[str, str] = {}
        for number, one in sorted(self._run.attempts.items())[-MAX_ATTEMPTS:]:
            begin = 0.0
            for phase, at in sorted(one.phases.items(), key=lambda item: item[1]):
                kinds.setdefault(phase, figures.COLORS[len(kinds) % len(figures.COLORS)])
                end = max(begin, at - one.began_at)
                words = f"{phase}: {end - begin:.2f} s, until {end:.2f} s"
                found.append(Stretch(f"attempt {number + 1}", begin, end, phase, words))
                begin = end
        if not found:
            return []
        return [
            span_chart(
                found, Names("starts", "Phases of each start", "seconds since the attempt began", kinds)
            )
        ]


def _attempts(run: Run) -> list[Stretch]:
    """Each attempt: its start, and what followed."""
    found = []
    for number, one in sorted(run.attempts.items())[-MAX_ATTEMPTS:]:
        row, kind = f"attempt {number + 1}", how_ended(one)
        began = one.began_at - run.began_at
        ended = max(one.ended_at, one.last_at, one.began_at) - run.began_at
        if one.running_at:
            running = min(ended, one.running_at - run.began_at)
            found.append(Stretch(row, began, running, "starting", f"{row} starts"))
            found.append(Stretch(row, running, ended, kind, f"{row}: {kind}"))
        else:
            kind = "starting" if one.ended is None else kind
            found.append(Stretch(row, began, ended, kind, f"{row}: {kind}"))
    return found


def _states(run: Run) -> list[Stretch]:
    """What ranks said that they do besides training."""
    return [
        Stretch("states of ranks", begin, end, state if state in _STRETCHES else "state", state)
        for begin, end, state in run.states
    ]


def _moments(run: Run) -> list[Stretch]:
    """Stragglers, hangs, questions for stacks, warnings and errors."""
    found = []

    def add(row: str, one: Mapping[str, Any], kind: str, words: str) -> None:
        at = one["at"] - run.began_at
        found.append(Stretch(row, at, at, kind, words[:200]))

    for straggler in run.stragglers[:MAX_MARKS]:
        begin = straggler["at"] - run.began_at
        end = straggler.get("over_at", straggler["at"]) - run.began_at
        words = f"rank {straggler.get('rank')} on {straggler.get('host')}: {straggler.get('cause')}"
        found.append(Stretch("stragglers", begin, max(begin, end), "straggler", words[:200]))
    for one in run.hangs[:MAX_MARKS]:
        add("hangs", one, "hang", f"rank {one.get('rank')} told of a hang")
    for one in run.stacks[:MAX_MARKS]:
        add("stacks", one, "stacks", str(one.get("title")))
    for one in [note for note in run.notes if note["level"] >= WARNING][:MAX_MARKS]:
        add("warnings and errors", one, "error" if one["level"] > WARNING else "warning", one["text"])
    return found


def how_ended(one: Attempt) -> str:
    """In one or two words."""
    if one.ended is None:
        return "running"
    if one.ended.get("interrupted_by") or one.ended.get("change"):
        return "stopped"
    return "ended well" if one.ended.get("exit_code") == 0 else "failed"


def _most(
    rows: Sequence[tuple[str, Mapping[str, float]]], by: Mapping[str, float]
) -> list[tuple[str, Mapping[str, float]]]:
    """At most so many that a person can look at: those of which there is most."""
    return sorted(rows, key=lambda one: -by[one[0]])[:MAX_BARS]
