"""Which steps of which ranks are traced, and where that goes."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import click

from ..errors import LaunchError
from ..inputs.rank_set import parse_ranks

_STEPS = re.compile("([1-9][0-9]{0,11})(?:-([1-9][0-9]{0,11}))?", re.ASCII)


class TraceOptions(NamedTuple):
    """`first` 0: nothing is traced. `ranks` None: the first rank of each host. `place` is empty if none
    was given.
    """

    first: int = 0
    last: int = 0
    ranks: tuple[range, ...] | None = None
    place: str = ""

    @property
    def is_on(self) -> bool:
        return self.first > 0

    @property
    def steps(self) -> str:
        """As it was written."""
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"


def _steps(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    match = _STEPS.fullmatch(value.strip())
    if match is None:
        raise click.BadParameter(
            f"{value!r} is not a step or a range of steps; write e.g. 10 or 10-12, where the first step is 1"
        )
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise click.BadParameter(f"{value!r} is an empty range; write {last}-{first}")
    return first, last


def _ranks(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[range, ...] | None:
    if value is None:
        return None
    try:
        ranks = parse_ranks(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if not ranks:
        raise click.BadParameter(f"{value!r}: no rank would be traced; write ranks such as 0,4-7, or all")
    return ranks


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--trace"],
        metavar="STEPS",
        callback=_steps,
        help=(
            "Trace these optimizer steps, e.g. 10-12, into one file that Perfetto opens, and print "
            "where their time went."
        ),
    ),
    click.Option(
        ["--trace_ranks"],
        metavar="RANKS",
        callback=_ranks,
        help="With --trace: these ranks: 0,4-7, or all.  [default: the first of each host, at most 8]",
    ),
    click.Option(
        ["--trace_to"],
        metavar="FILE",
        help="With --trace: into FILE.  [default: trace-NAME.json.gz]",
    ),
)


def read(given: dict[str, Any]) -> TraceOptions:
    """The options of this file from all that were given, by parameter name.

    Errors: LaunchError where they have no meaning
    """
    for option in ("trace_ranks", "trace_to"):
        if given[option] is not None and given["trace"] is None:
            raise LaunchError(f"--{option} has no effect without --trace; add --trace=STEPS, or leave it out")
    if given["trace"] is None:
        return TraceOptions()
    first, last = given["trace"]
    place = given["trace_to"] or ""
    if place and not place.endswith((".json", ".json.gz")):
        raise LaunchError(
            f"--trace_to={place}: Perfetto knows the file by its end; let the name end in .json.gz or .json"
        )
    return TraceOptions(first=first, last=last, ranks=given["trace_ranks"], place=place)
