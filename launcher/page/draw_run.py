"""Which charts a run has."""

from __future__ import annotations

from collections.abc import Mapping

from . import figures
from .chart import Chart, time_unit
from .run import FOLDED, MEMORY_KINDS, PHASES, Attempt, Run, Totals

MAX_BARS = 64
MAX_ATTEMPTS = 30  # on one time line of starts
MAX_MARKS = 200
GIB = float(1 << 30)
MIB = float(1 << 20)

PHASE_NAMES = {
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimizer",
    "comm_s": "waiting for others",
    "data_s": "data",
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
    "disk_read": ("Disks, read", "MiB/s", MIB),
    "disk_write": ("Disks, written", "MiB/s", MIB),
    "gpu_util": ("GPUs in use, mean of a host", "%", 0.01),
    "gpu_mem": ("GPU memory in use, the fullest of a host", "GiB", GIB),
    "gpu_power": ("GPU power, sum of a host", "W", 1.0),
    "gpu_temp": ("GPU temperature, the hottest of a host", "°C", 1.0),
}
_NO_CURVES = frozenset((*TRAINING, "step", "step_s", "own_s", "lines", "mem_used", "mem_peak"))
_STRETCHES = {
    "starting": "#9c7618",
    "running": "#2f7ed8",
    "ended well": "#2e9a58",
    "failed": "#d9484d",
    "stopped": "#955be0",
    "saving": "#1b95a3",
    "loading": "#1b95a3",
    "evaluating": "#cf4698",
    "state": "#7d8590",
    "straggler": "#cf6a0c",
    "hang": "#d9484d",
    "stacks": "#955be0",
    "warning": "#9c7618",
    "error": "#d9484d",
}
_PHASE_COLORS = ("#2f7ed8", "#cf6a0c", "#2e9a58", "#d9484d", "#955be0", "#1b95a3", "#cf4698", "#9c7618")


class RunCharts:
    """The charts of one run, all with one axis of time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        starts = [one.began_at - run.began_at for _, one in sorted(run.attempts.items())][1:MAX_MARKS]
        self._unit = time_unit(max(run.duration_s, run.last_at - run.began_at))
        self._axis = figures.time_axis(self._unit, starts)

    def _curve(self, name: str, title: str, unit: str = "", *, scale: float = 1.0, whose: str = "rank") -> Chart:
        return figures.curve_chart(
            self._run.curves[name],
            key=f"curve-{name}",
            title=title,
            unit=unit,
            axis=self._axis,
            whose=whose,
            scale=scale,
            steps=self._run.curves.get("step"),
            from_zero=name in ("rate", "tokens", "samples", "lines", "step_s", "own_s", "skipped"),
        )

    def training(self) -> list[Chart]:
        """What the program tells, over time."""
        curves = self._run.curves
        found = [self._curve(name, *words) for name, words in TRAINING.items() if curves.get(name)]
        for name in curves:
            if name not in _NO_CURVES:
                found.append(self._curve(name, name))
        return found

    def output(self) -> list[Chart]:
        return [self._curve("lines", "Lines of output, of all ranks", "lines/s", whose="")] if self._run.curves.get(
            "lines"
        ) else []

    def times(self) -> list[Chart]:
        """What a step is made of: over time, and of each rank."""
        run, found = self._run, []
        if run.shares:
            points = list(run.shares.points())
            found.append(
                figures.stack_chart(
                    points,
                    names=PHASE_NAMES,
                    key="phases",
                    title="A step by phase, mean of all ranks",
                    unit="s per step",
                    axis=self._axis,
                )
            )
        if run.curves.get("step_s"):
            found.append(self._curve("step_s", "Time of a step", "s"))
        if run.curves.get("own_s"):
            found.append(self._curve("own_s", "Of that, not waiting for others", "s"))
        rows = self._phases_by_rank()
        if rows:
            found.append(
                figures.bar_chart(
                    rows, names=PHASE_NAMES, key="phases-by-rank", title=self._whose("A step by rank"), unit="s per step"
                )
            )
        return found

    def _phases_by_rank(self) -> list[tuple[str, dict[str, float]]]:
        rows = [
            (key, {name: value / one.steps for name, value in one.seconds.items() if name != "step_s"})
            for key, one in self._run.totals.items()
            if one.steps > 0
        ]
        return self._named(_most(rows, {key: sum(row.values()) - row.get("comm_s", 0.0) for key, row in rows}))

    def memory(self) -> list[Chart]:
        """Of ranks: by kind as told last, the greatest there was, and over time."""
        run, found = self._run, []
        rows = []
        marks: dict[str, float] = {}
        for key, one in run.totals.items():
            kinds = {name: one.memory[name] / GIB for name in MEMORY_KINDS if name in one.memory}
            used = one.memory.get("mem_used", 0.0) / GIB
            kinds["unknown"] = max(0.0, used - sum(kinds.values()))
            if used or sum(kinds.values()):
                rows.append((key, kinds))
                marks[key] = one.peak / GIB
        if rows:
            chosen = _most(rows, marks)
            named = self._named(chosen)
            names = dict(zip((key for key, _ in chosen), (name for name, _ in named), strict=True))
            found.append(
                figures.bar_chart(
                    named,
                    names=MEMORY_NAMES,
                    key="memory",
                    title=self._whose("Memory by rank, as told last"),
                    unit="GiB",
                    marks={name: marks[key] for key, name in names.items()},
                    mark="the most there was",
                )
            )
        if run.curves.get("mem_used"):
            found.append(self._curve("mem_used", "Memory in use", "GiB", scale=GIB))
        return found

    def _named(self, rows: list[tuple[str, Mapping[str, float]]]) -> list[tuple[str, dict[str, float]]]:
        """With the host of each rank; in the order of ranks."""
        last = self._run.last_attempt
        host_of = last.host_of if last else {}

        def order(key: str) -> tuple[int, int, str]:
            return (1, 0, key) if key.endswith(FOLDED) else (0, int(key), "")

        found = []
        for key, row in sorted(rows, key=lambda one: order(one[0])):
            host = host_of.get(int(key)) if not key.endswith(FOLDED) else None
            name = f"{key.removesuffix(FOLDED)} (mean)" if key.endswith(FOLDED) else f"rank {key}"
            found.append((f"{name}, {host}" if host else name, dict(row)))
        return found

    def _whose(self, title: str) -> str:
        num = len(self._run.totals)
        if any(key.endswith(FOLDED) for key in self._run.totals):
            title = title.replace("by rank", "by host, mean of its ranks")
        return f"{title}: the {MAX_BARS} greatest of {num}" if num > MAX_BARS else title

    def hosts(self) -> list[Chart]:
        found = []
        for name, (title, unit, scale) in HOST_CHARTS.items():
            curve = self._run.hosts_curves.get(name)
            if curve:
                found.append(
                    figures.curve_chart(
                        curve,
                        key=f"host-{name}",
                        title=title,
                        unit=unit,
                        axis=self._axis,
                        whose="host" if not curve.has_lines else "",
                        scale=scale,
                        from_zero=True,
                    )
                )
        return found

    def time_line(self) -> list[Chart]:
        """When each attempt began and ended, and what was seen meanwhile."""
        run = self._run
        bars: list[tuple[str, float, float, str, str]] = []
        for number, one in sorted(run.attempts.items())[-MAX_ATTEMPTS:]:
            bars.extend(_stretches(run, number, one))
        for begin, end, state in run.states[:MAX_MARKS]:
            kind = state if state in _STRETCHES else "state"
            bars.append(("states of ranks", begin, max(end, begin), kind, state))
        marks: list[tuple[str, float, str, str]] = []
        for one in run.stragglers[:MAX_MARKS]:
            words = f"rank {one.get('rank')} on {one.get('host')}: {one.get('cause')}"
            marks.append(("stragglers", one["at"] - run.began_at, "straggler", words))
        for one in run.hangs[:MAX_MARKS]:
            marks.append(("hangs", one["at"] - run.began_at, "hang", f"rank {one.get('rank')} told of a hang"))
        for one in run.stacks[:MAX_MARKS]:
            marks.append(("stacks", one["at"] - run.began_at, "stacks", str(one.get("title"))[:200]))
        for one in [note for note in run.notes if note["level"] >= 30][:MAX_MARKS]:
            kind = "error" if one["level"] >= 40 else "warning"
            marks.append(("warnings and errors", one["at"] - run.began_at, kind, one["text"][:200]))
        if not bars and not marks:
            return []
        return [
            figures.span_chart(
                bars,
                kinds=_STRETCHES,
                key="time-line",
                title="The run over time",
                label=self._axis.label,
                axis=self._axis,
                marks=marks,
            )
        ]

    def starts(self) -> list[Chart]:
        """The phases of each start, each from the end of the one before."""
        bars: list[tuple[str, float, float, str, str]] = []
        kinds: dict[str, str] = {}
        for number, one in sorted(self._run.attempts.items())[-MAX_ATTEMPTS:]:
            before = one.began_at
            for phase, at in sorted(one.phases.items(), key=lambda item: item[1]):
                kinds.setdefault(phase, _PHASE_COLORS[len(kinds) % len(_PHASE_COLORS)])
                begin, end = before - one.began_at, at - one.began_at
                words = f"{phase}: {end - begin:.2f} s, until {end:.2f} s"
                bars.append((f"attempt {number + 1}", begin, end, phase, words))
                before = at
        if not bars:
            return []
        return [
            figures.span_chart(
                bars, kinds=kinds, key="starts", title="Phases of each start", label="seconds since the attempt began"
            )
        ]


def _stretches(run: Run, number: int, one: Attempt) -> list[tuple[str, float, float, str, str]]:
    """An attempt as bars: its start, and what followed."""
    row = f"attempt {number + 1}"
    began = one.began_at - run.began_at
    ended = max(one.ended_at, one.last_at, one.began_at) - run.began_at
    running = one.running_at - run.began_at if one.running_at else None
    kind = how_ended(one)
    found = [(row, began, running if running is not None else ended, "starting", f"{row} starts")]
    if running is not None:
        found.append((row, running, max(running, ended), kind, f"{row}: {kind}"))
    elif one.ended is not None:
        found = [(row, began, ended, kind, f"{row}: {kind}")]
    return found


def how_ended(one: Attempt) -> str:
    if one.ended is None:
        return "running"
    if one.ended.get("interrupted_by") or one.ended.get("change"):
        return "stopped"
    return "ended well" if one.ended.get("exit_code") == 0 else "failed"


def _most(
    rows: list[tuple[str, dict[str, float]]], by: Mapping[str, float]
) -> list[tuple[str, Mapping[str, float]]]:
    """At most so many that a person can look at: those of which there is most."""
    ordered = sorted(rows, key=lambda one: -by[one[0]])
    return list(ordered[:MAX_BARS])
