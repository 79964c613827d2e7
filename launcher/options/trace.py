"""The traced steps and ranks, and the place of the trace."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import LaunchError
from ..inputs.rank_set import parse_ranks
from .option import option, record

_STEPS = re.compile("([1-9][0-9]{0,11})(?:-([1-9][0-9]{0,11}))?", re.ASCII)


def _steps(value: str) -> tuple[int, int]:
    match = _STEPS.fullmatch(value.strip())
    if match is None:
        raise ValueError(
            f"{value!r} is not a step or a range of steps; write e.g. 10 or 10-12, where the first step is 1"
        )
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"{value!r} is an empty range; write {last}-{first}")
    return first, last


def _ranks(value: str) -> tuple[range, ...]:
    ranks = parse_ranks(value)
    if not ranks:
        raise ValueError(f"{value!r}: no rank would be traced; write ranks such as 0,4-7, or all")
    return ranks


@record
class TraceOptions(NamedTuple):
    """`bounds` are the first and the last step; 0: there is no trace. `ranks` None: the first rank of each
    host. `place` is empty if none was given.
    """

    bounds: tuple[int, int] = option(
        "--trace",
        topic="output",
        default=(0, 0),
        read=_steps,
        metavar="STEPS",
        help=(
            "Trace these optimizer steps, e.g. 10-12, into one file that Perfetto opens, and print "
            "where their time went."
        ),
    )
    ranks: tuple[range, ...] | None = option(
        "--trace_ranks",
        topic="output",
        needs="--trace",
        read=_ranks,
        metavar="RANKS",
        help="With --trace: these ranks: 0,4-7, or all.  [default: the first of each host, at most 8]",
    )
    place: str = option(
        "--trace_to",
        topic="output",
        needs="--trace",
        default="",
        metavar="FILE",
        help="With --trace: into FILE.  [default: trace-NAME.json.gz]",
    )

    @property
    def first(self) -> int:
        return self.bounds[0]

    @property
    def last(self) -> int:
        return self.bounds[1]

    @property
    def is_on(self) -> bool:
        return self.first > 0

    @property
    def steps(self) -> str:
        """Return the steps as the user writes them: 3-5, or 3."""
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"

    def settled(self, given: Mapping[str, Any]) -> TraceOptions:
        """Settle the options. Errors: LaunchError for a file that Perfetto would not open"""
        if self.place and not self.place.endswith((".json", ".json.gz")):
            raise LaunchError(
                f"--trace_to={self.place}: Perfetto knows the file by its end; let the name end in .json.gz "
                "or .json"
            )
        return self
