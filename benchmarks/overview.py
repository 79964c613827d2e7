"""Draw the README's picture, docs/reference/overview.png, from the figures of docs/reference/benchmarks.md.

    python benchmarks/overview.py

It measures nothing. The picture carries the figures that it shows, so that a test sees when the tables have
newer ones.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.guide_section import GUIDE

PICTURE = GUIDE.with_name("overview.png")
FIGURES_KEY = "Description"  # key among the PNG's texts
COLORS = {
    "dslaunch": "tab:blue",
    "FSDP2": "0.45",
    "DeepSpeed": "tab:orange",
    "deepspeed + pdsh": "tab:orange",
    "pdsh": "tab:green",
    "mpirun": "tab:red",
    "ssh + xargs": "tab:purple",
    "paramiko: true": "0.7",
    "paramiko: python": "0.45",
}
LABEL_LIFT = {"pdsh": 2, "ssh + xargs": -8}  # points; the two lines end at nearly the same place
STEP_TOOLS = {"dslaunch": "dslaunch 3", "FSDP2": "FSDP2", "DeepSpeed": "DeepSpeed 3"}
STEP_CASES = (
    "comm-bound, 2 ranks",
    "comm-bound, 4 ranks",
    "compute-bound, 2 ranks",
    "compute-bound, 4 ranks",
)
MEMORY_CASES = (
    "engine, stage 1, bf16",
    "engine, stage 2, fp32",
    "engine, stage 3, fp32",
    "engine, stage 3, bf16",
)

Bars = Mapping[str, Mapping[str, float]]  # tool -> case -> number


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of the picture, as the tables have them."""

    machine: str
    start_s: Bars  # tool -> number of hosts -> seconds
    step_ms: Bars
    peak_mb: Bars


def figures(text: str) -> Figures:
    """Read the tables of the page.

    Errors: ValueError if a table or one of its rows is not there
    """
    launch, zero, drop_in = (
        section(text, f"make {name}") for name in ("bench-launch", "bench-zero", "bench-drop-in")
    )
    starts = table_under(launch, "hosts")
    steps = table_under(zero, "", after="Milliseconds per step:")
    memory = table_under(drop_in, "")
    machine = re.search(r"^(\d+ cores of [^,]+), ", zero, re.MULTILINE)
    if machine is None:
        raise ValueError("the tables of `make bench-zero` do not say on which machine they were measured")
    pairs = {
        case: memory[case]["peak MB of rank 0"].partition(" = ")[0].split(" / ") for case in MEMORY_CASES
    }
    return Figures(
        machine=machine[1],
        start_s={
            tool: {hosts: float(row[tool]) for hosts, row in starts.items() if row[tool]}
            for tool in next(iter(starts.values()))
        },
        step_ms={
            tool: {case: float(steps[row][case]) for case in STEP_CASES} for tool, row in STEP_TOOLS.items()
        },
        peak_mb={
            tool: {case: float(pair[place]) for case, pair in pairs.items()}
            for place, tool in enumerate(("dslaunch", "DeepSpeed"))
        },
    )


def section(text: str, command: str) -> str:
    """Return the section that `command` has written into the page."""
    match = re.search(rf"<!-- made by `{command}`: begin -->(.*?)<!-- made by", text, re.DOTALL)
    if match is None:
        raise ValueError(f"{GUIDE.name} has no tables of `{command}`")
    return match[1]


def table_under(text: str, corner: str, *, after: str = "") -> dict[str, dict[str, str]]:
    """The first table behind `after` whose upper left cell is `corner`: its cells by row and column."""
    head: list[str] = []
    rows: dict[str, dict[str, str]] = {}
    for line in text[text.index(after) :].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            if rows:
                break
        elif head:
            if not set(cells[0]) <= {"-"} or not cells[0]:
                rows[cells[0]] = dict(zip(head, cells[1:], strict=True))
        elif cells[0] == corner:
            head = cells[1:]
    if not rows:
        raise ValueError(f"{GUIDE.name} has no table whose first column is {corner!r}")
    return rows


def shown(path: Path) -> dict[str, Any]:
    """The figures that a picture was drawn from.

    Errors: ValueError if it carries none
    """
    from PIL import Image

    with Image.open(path) as image:
        text = image.info.get(FIGURES_KEY)
    if not isinstance(text, str):
        raise ValueError(f"{path} does not say which figures it shows; draw it with benchmarks/overview.py")
    figures: dict[str, Any] = json.loads(text)
    return figures


def draw(found: Figures, path: Path) -> None:
    """Three pictures side by side: start, step, memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (start, step, memory) = pyplot.subplots(
        1, 3, figsize=(13, 4.3), layout="constrained", width_ratios=(1, 1.15, 1.0)
    )
    draw_starts(start, found.start_s)
    start.set_title("Start a program on N hosts: seconds", fontsize=11)
    step_labels = [case.replace(", ", "\n").replace("-bound", "") for case in STEP_CASES]
    draw_bars(step, found.step_ms, STEP_CASES, step_labels)
    step.set_title("One step at stage 3: milliseconds", fontsize=11)
    memory_labels = [case.removeprefix("engine, ").replace(", ", "\n") for case in MEMORY_CASES]
    draw_bars(memory, found.peak_mb, MEMORY_CASES, memory_labels)
    memory.set_title("Peak memory of rank 0: MB", fontsize=11)
    figure.suptitle(
        f"Less is better. CPU only, all hosts and ranks on one machine: {found.machine}", fontsize=10
    )
    figure.savefig(path, dpi=110, metadata={FIGURES_KEY: json.dumps(asdict(found))})
    pyplot.close(figure)


def draw_starts(axes: Any, start_s: Bars) -> None:
    from matplotlib.ticker import FuncFormatter

    for tool, times in start_s.items():
        hosts = [int(count) for count in times]
        width = 2.5 if tool == "dslaunch" else 1.3
        axes.plot(
            hosts, list(times.values()), "o-", markersize=4, linewidth=width, color=COLORS[tool], label=tool
        )
        axes.annotate(
            f"{list(times.values())[-1]:g}",
            (hosts[-1], list(times.values())[-1]),
            textcoords="offset points",
            xytext=(5, LABEL_LIFT.get(tool, -3)),
            fontsize=8,
            color=COLORS[tool],
        )
    counts = [int(count) for count in start_s["dslaunch"]]
    axes.set(xscale="log", yscale="log", xlabel="hosts", ylabel="logarithmic scale", xlim=(0.8, 120))
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_yticks([0.2, 0.5, 1, 2, 5, 10, 20])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_ylim(top=90)
    axes.legend(fontsize=7, ncols=2, loc="upper left")


def draw_bars(axes: Any, values: Bars, cases: Sequence[str], labels: Sequence[str]) -> None:
    width = 0.8 / len(values)
    for place, (tool, by_case) in enumerate(values.items()):
        at = [case + place * width for case in range(len(cases))]
        bars = axes.bar(at, [by_case[case] for case in cases], width, color=COLORS[tool], label=tool)
        axes.bar_label(bars, fmt="%g", fontsize=7, padding=1)
    axes.set_xticks([case + 0.4 - width / 2 for case in range(len(cases))], labels, fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.margins(y=0.2)
    axes.legend(fontsize=8, ncols=len(values), loc="upper center")


def main() -> int:
    draw(figures(GUIDE.read_text(encoding="utf-8")), PICTURE)
    print(f"wrote {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
