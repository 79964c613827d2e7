"""Results of the launch benchmark: as a table for people, as JSON, as a picture,
and as a section of the guide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.guide_section import conditions, paragraphs, picture, replace_section, table
from benchmarks.overview import draw_starts

COMMAND = "make bench-launch"
PICTURE = "launch.png"
PHASES_PICTURE = "launch-phases.png"
ON_ONE_MACHINE = "all hosts on one machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One measure beside one peer; None where it could not be measured."""

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
    phases: Mapping[int, Mapping[str, float]]  # number of hosts -> end of each phase of ours


# ---- for people


def markdown(results: Results) -> str:
    """Return the place of the measurement, the table of the curve and the table of the targets."""
    curve = [
        (str(count), *(_seconds(times[place]) for times in results.curve.values()))
        for place, count in enumerate(results.counts)
    ]
    return paragraphs(
        f"{conditions()}; medians of {results.num_runs} runs, the tools taking turns.",
        "Seconds until the last host's program ran:",
        table(("hosts", *results.curve), curve),
        "Beside the peers, in the same run:",
        table(("", "dslaunch", "peer", "ratio", "goal"), [target.row() for target in results.targets]),
        f"Left out: {'; '.join(results.missing)}." if results.missing else "",
    )


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
    curve = f"![seconds until the last of N hosts runs a program]({PICTURE})"
    phases = f"![seconds of each phase of a start on N hosts]({PHASES_PICTURE})"
    replace_section(guide, COMMAND, f"{curve}\n\n{markdown(results)}\n\n{phases}")
    draw(results, guide.with_name(PICTURE))
    draw_phases(results, guide.with_name(PHASES_PICTURE))


def draw(results: Results, path: Path) -> None:
    """Draw one line for each tool, both axes logarithmic."""
    curve = {
        name: {
            str(count): round(s, 2) for count, s in zip(results.counts, times, strict=True) if s is not None
        }
        for name, times in results.curve.items()
    }
    with picture(path, "Seconds until the last of N hosts runs a program", ON_ONE_MACHINE) as axes:
        draw_starts(axes, {name: times for name, times in curve.items() if times})


def draw_phases(results: Results, path: Path) -> None:
    """A bar for each number of hosts, cut into the phases of a start."""
    names = list(dict.fromkeys(name for ends in results.phases.values() for name in ends))
    begins = dict.fromkeys(results.phases, 0.0)
    with picture(path, "Where the time of a start goes", ON_ONE_MACHINE) as axes:
        for name in names:
            ends = [of.get(name, 0.0) for of in results.phases.values()]
            lengths = [max(0.0, end - begin) for end, begin in zip(ends, begins.values(), strict=True)]
            axes.bar([str(count) for count in begins], lengths, bottom=[*begins.values()], label=name)
            for count, length in zip(begins, lengths, strict=True):
                begins[count] += length
        axes.set(xlabel="hosts", ylabel="seconds")
        axes.grid(alpha=0.3, axis="y")
        axes.legend()
