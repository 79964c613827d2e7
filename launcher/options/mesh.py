"""How many ranks the job has along each axis of its parallelism."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import click

AXES = ("pp", "dp", "ep", "sp", "tp")
_SIZE = re.compile(r"\s*([a-z]+)\s*=\s*([1-9][0-9]{0,6})\s*")


class MeshOptions(NamedTuple):
    """`sizes` are by axis, as they were given; none: nothing was said."""

    sizes: tuple[tuple[str, int], ...] = ()


def _sizes(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[tuple[str, int], ...]:
    if value is None:
        return ()
    found: dict[str, int] = {}
    for item in value.split(","):
        match = _SIZE.fullmatch(item)
        if match is None or match[1] not in AXES or match[1] in found:
            raise click.BadParameter(
                f"{value[:80]!r}: {item.strip()[:20]!r} is not allowed: sizes of pp (pipeline), dp (data), "
                "ep (experts), sp (sequence) and tp (tensor), each once, are whole numbers above 0; write "
                "e.g. pp=2,tp=2"
            )
        found[match[1]] = int(match[2])
    return tuple(found.items())


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--mesh"],
        metavar="AXES",
        callback=_sizes,
        help=(
            "How many ranks work together along each axis, e.g. pp=2,tp=2: pp (pipeline), dp (data), ep "
            "(experts), sp (sequence), tp (tensor). An axis that is left out has 1, and dp what remains."
        ),
    ),
)


def read(given: dict[str, Any]) -> MeshOptions:
    """The options of this file from all that were given, by parameter name."""
    return MeshOptions(sizes=given["mesh"])
