"""What the launch benchmark found: as a table for people, as JSON, as a picture,
and as a section of the guide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.guide_section import conditions, replace_section, table

COMMAND = "make bench-launch"
PICTURE = "launch.png"
PHASES_PICTURE = "launch-phases.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One measure beside one peer; None is what could not be measured."""

    measure: str
    ours: float | None
    peer: str
    theirs: float | None
    unit: str  # "s" or "ms"
    max_ratio: float | None = None
    max_ours: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.ours / self.theirs if self.ours is not None and self.theirs else None

    @property
    def is_missed(self) -> bool:
        """Whether a goal is known not to be reached."""
        goals = ((self.ratio, self.max_ratio), (self.ours, self.max_ours))
        return any(value is not None and limit is not None and value > limit for value, limit in goals)

    def row(self) -> tuple[str, ...]:
        ratio = (
            "" if self.ratio is None else f"{self.ratio:.2f}" if self.ratio >= 0.1 else f"{self.ratio:.3f}"
        )
        goals = [f"ratio <= {self.max_ratio:.3g}"] if self.max_ratio is not None else []
        goals += [f"<= {self.max_ours:g} {self.unit}"] if self.max_ours is not None else []
        goal = ", ".join(goals) + (" (missed)" if self.is_missed else "")
        theirs = f"{self.peer} {self._shown(self.theirs)}" if self.peer else ""
        return self.measure, self._shown(self.ours), theirs, ratio, goal

    def _shown(self, value: float | None) -> str:
        if value is None:
            return "not measured"
        return f"{value:.0f} {self.unit}" if value >= 100 else f"{value:.3g} {self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """`curve[tool][place]` belongs to `counts[place]`: seconds until the last host's program ran."""

    counts: tuple[int, ...]
    curve: Mapping[str, tuple[float | None, ...]]
    targets: tuple[Target, ...]
    num_runs: int
    missing: tuple[str, ...]  # why a tool was left out
    phases: Mapping[int, Mapping[str, float]]  # by the number of hosts: when each phase of ours had ended


# ---- for people


def markdown(results: Results) -> str:
    """Where it was measured, the table of the curve and the table of the targets."""
    parts = [
        f"{conditions()}; medians of {results.num_runs} runs, the tools taking turns.",
        "Seconds until the last host's program ran:",
        table(("hosts", *results.curve), _curve_rows(results)),
        "Beside the peers, in the same run:",
        table(("", "dslaunch", "peer", "ratio", "goal"), [target.row() for target in results.targets]),
    ]
    if results.missing:
        parts.append(f"Left out: {'; '.join(results.missing)}.")
    return "\n\n".join(parts) + "\n"


def _curve_rows(results: Results) -> list[tuple[str, ...]]:
    return [
        (str(count), *(_seconds(times[place]) for times in results.curve.values()))
        for place, count in enumerate(results.counts)
    ]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


# ---- as files


def write(results: Results, folder: Path) -> None:
    """Write launch.json, launch.md and launch.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "launch.json").write_text(json.dumps(asdict(results), indent=2) + "\n")
    (folder / "launch.md").write_text(markdown(results))
    draw(results, folder / PICTURE)
    draw_phases(results, folder / PHASES_PICTURE)


def publish(results: Results, guide: Path) -> None:
    """Put the tables in place of those in `guide`, and the picture beside it.

    Errors: ValueError if the guide has no place for them
    """
    picture = f"![seconds until the last of N hosts runs a program]({PICTURE})"
    phases = f"![seconds of each phase of a start on N hosts]({PHASES_PICTURE})"
    replace_section(guide, COMMAND, f"{picture}\n\n{markdown(results)}\n{phases}\n")
    draw(results, guide.with_name(PICTURE))
    draw_phases(results, guide.with_name(PHASES_PICTURE))


def draw(results: Results, path: Path) -> None:
    """One line for each tool, both axes logarithmic."""
    import matplotlib  # late: it takes a second, and the measuring comes first

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    figure, axes = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    for name, times in results.curve.items():
        points = [
            (count, took) for count, took in zip(results.counts, times, strict=True) if took is not None
        ]
        if points:
            width = 2.5 if name == "dslaunch" else 1.3
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=width, label=name)
    axes.set(xscale="log", yscale="log", xlabel="hosts", ylabel="seconds until the last one runs the program")
    axes.set_xticks(results.counts, [str(count) for count in results.counts])
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2, 5, 10, 20])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.suptitle("Starting a program on N hosts")
    axes.set_title(f"all hosts on one machine: {conditions()}", fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_phases(results: Results, path: Path) -> None:
    """A bar for each number of hosts, cut into the phases of a start."""
    import matplotlib  # as above

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    names = list(dict.fromkeys(name for ends in results.phases.values() for name in ends))
    begins = dict.fromkeys(results.phases, 0.0)
    for name in names:
        lengths = [max(0.0, ends.get(name, 0.0) - begins[count]) for count, ends in results.phases.items()]
        axes.bar([str(count) for count in begins], lengths, bottom=[*begins.values()], label=name)
        for count, length in zip(begins, lengths, strict=True):
            begins[count] += length
    axes.set(xlabel="hosts", ylabel="seconds")
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
    figure.suptitle("Where the time of a start goes")
    axes.set_title(f"all hosts on one machine: {conditions()}", fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
