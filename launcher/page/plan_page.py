"""The page of a planned job: verdict, memory of each kind of rank over its first steps, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .chart import Chart
from .figures import ChartAxis
from .markup import element, escaped, lines_of
from .page import PageSection, document
from .part_figures import PartNames, stack_chart

_GIB = float(1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMemory:
    """Device memory of one kind of rank over its first steps.

    Units: bytes, by kind; a point's number counts the operations before it
    """

    name: str
    points: tuple[tuple[int, tuple[tuple[str, int], ...]], ...]
    phases: tuple[int, ...]  # the points where phases begin


def plan_page(*, title: str, fits: bool, lines: Sequence[str], ranks: Sequence[PlannedMemory]) -> str:
    """Return the page; `lines` are those that the command prints, the verdict first."""
    tables = lines.index("") if "" in lines else len(lines)
    verdict, *notes = lines[:tables]
    sections = [
        PageSection(
            key="summary",
            title="Summary",
            text=element("p", escaped(verdict))
            + "".join(element("p", escaped(one), class_="soft") for one in notes),
        ),
        PageSection(
            key="memory", title="Memory over the first steps", charts=list(_charts(ranks)), is_wide=True
        ),
        PageSection(key="tables", title="Tables", text=lines_of(lines[tables + 1 :])),
    ]
    words, kind = ("fits", "good") if fits else ("does not fit", "bad")
    head = element("h1", escaped(title)) + element("span", words, class_=f"state {kind}")
    return document(f"{title}: {words}", head, sections)


def _charts(ranks: Sequence[PlannedMemory]) -> Iterator[Chart]:
    for number, rank in enumerate(ranks):
        if not rank.points:
            continue
        kinds = dict.fromkeys(kind for _, row in rank.points for kind, _ in row)
        names = PartNames(f"plan{number}", f"Memory of {rank.name}", "GiB", {kind: kind for kind in kinds})
        points = [(float(at), 0, {kind: size / _GIB for kind, size in row}) for at, row in rank.points]
        axis = ChartAxis(
            "operations since the start", starts=[float(one) for one in rank.phases], noun="operations"
        )
        yield stack_chart(points, names, axis=axis)
