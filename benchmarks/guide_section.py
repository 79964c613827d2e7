"""The part of docs/reference/benchmarks.md that a benchmark writes by itself."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
GUIDE = CHECKOUT / "docs" / "reference" / "benchmarks.md"


def arguments(text: str | None, *, short: str = "") -> argparse.ArgumentParser:
    """The options of a benchmark whose docstring is `text`; `short` says what `--short` measures."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if short:
        parser.add_argument("--short", action="store_true", help=short)
    parser.add_argument("--publish", action="store_true", help=f"write the results into {GUIDE.name}")
    return parser


def publish(command: str, text: str, *, is_wanted: bool) -> None:
    """Print the results; put them in place of what `command` wrote into the guide before, if that is wanted.

    Errors: as `replace_section`
    """
    print(f"\n{text}")
    if is_wanted:
        replace_section(GUIDE, command, text)


def replace_section(guide: Path, command: str, text: str) -> None:
    """Replace the section that `command` wrote into `guide` before by `text`.

    Errors: ValueError if the guide has no place for it
    """
    begin, end = (f"<!-- made by `{command}`: {word} -->" for word in ("begin", "end"))
    before, found_begin, rest = guide.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{guide}: no lines {begin} and {end}; put them where the tables belong")
    guide.write_text(f"{before}{begin}\n\n{text.rstrip()}\n\n{end}{after}")


def conditions() -> str:
    """The machine in a few words."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    cores = len(os.sched_getaffinity(0))
    linux = platform.release().partition("-")[0]
    return f"{cores} cores of {cpu}, Linux {linux}, Python {platform.python_version()}"


@contextmanager
def picture(path: Path, title: str, where: str, size: tuple[float, float] = (8, 4.8)) -> Iterator[Any]:
    """Axes to draw on, which are written to `path` then. `where` says where all hosts or ranks were."""
    import matplotlib  # imported at need: it takes a second, and the measuring comes first

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    yield axes
    figure.suptitle(title)
    axes.set_title(f"{where}: {conditions()}", fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def goal(value: float, limit: float, sign: str = "<=") -> str:
    """The goal `sign limit`, and whether it is missed."""
    is_met = value <= limit if sign == "<=" else value >= limit
    return f"{sign} {limit:g}{'' if is_met else ' (missed)'}"


def left_out(missing: str) -> str:
    """Why DeepSpeed is not in the tables; nothing if it is."""
    return f"Left out: DeepSpeed, because {missing}." if missing else ""


def paragraphs(*parts: str) -> str:
    """Join the parts that are not empty."""
    return "\n\n".join(filter(None, parts))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
