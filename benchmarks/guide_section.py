"""The part of docs/reference/benchmarks.md that a benchmark writes by itself."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path


def conditions() -> str:
    """The machine in a few words."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores of {cpu}, Linux {platform.release().partition('-')[0]}, Python "
        f"{platform.python_version()}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def replace_section(guide: Path, command: str, text: str) -> None:
    """Put `text` in place of what `command` wrote into `guide` before.

    Errors: ValueError if the guide has no place for it
    """
    begin, end = (f"<!-- made by `{command}`: {word} -->" for word in ("begin", "end"))
    before, found_begin, rest = guide.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{guide}: no lines {begin} and {end}; put them where the tables belong")
    guide.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
