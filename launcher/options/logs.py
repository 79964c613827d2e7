"""The output of the ranks: where it goes, and its form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import click

from ..errors import LaunchError
from ..inputs.line_prefix import FIELDS, check_template
from ..inputs.rank_set import parse_ranks
from .option import flag, option, record


def _template(value: str) -> str:
    check_template(value)
    return value


@record
class LogOptions(NamedTuple):
    """None means not given. `ranks` are those that the console shows."""

    ranks: tuple[range, ...] | None = option(
        "--tee",
        "--ranks",
        topic="output",
        read=parse_ranks,
        metavar="RANKS",
        help="Show only these ranks: 0,4-7, or all, or none.  [default: all]",
    )
    prefix: str | None = option(
        "--prefix",
        topic="output",
        may_be_empty=True,
        read=_template,
        metavar="TEMPLATE",
        help=f"What stands before each line; fields: {', '.join(FIELDS)}.  [default: '{{host}}:{{rank}} |']",
    )
    has_timestamps: bool = flag("--timestamps", topic="output", help="Show when each line arrived.")
    is_folding: bool = flag(
        "--fold", topic="output", help="Show a line that several ranks write at one time only once."
    )
    folds_failures: bool = option(
        "--fold_failures",
        topic="output",
        default=True,
        read=lambda text: text == "yes",
        type=click.Choice(["yes", "no"]),
        help="Show one line of each rank that only lost another one, not its traceback.  [default: yes]",
    )
    log_dir: str | None = option(
        "--log_dir",
        topic="output",
        metavar="DIR",
        help="Keep each rank's output, and the report, in DIR/<run>.",
    )
    each_rank_dir: str | None = option(
        "--enable_each_rank_log",
        topic="deepspeed",
        read=lambda text: None if text == "None" else text,
        metavar="DIR",
        help="Write each rank's output to DIR/<time>_rank<rank>.log, and show none.",
    )

    def settled(self, given: Mapping[str, Any]) -> LogOptions:
        """Settle the options. Errors: LaunchError for an option without effect"""
        if self.is_folding and self.prefix:
            raise LaunchError(
                "--fold and --prefix exclude each other: a folded line has a prefix of its own; give one "
                "of them"
            )
        shows_none = self.ranks == () or (self.ranks is None and self.each_rank_dir is not None)
        how_shown = (
            ("--fold", self.is_folding),
            ("--prefix", self.prefix is not None),
            ("--timestamps", self.has_timestamps),
        )
        for name, is_given in how_shown:
            if is_given and shows_none:
                raise LaunchError(
                    f"{name} has no effect, because no rank is shown; leave it out, or show some with --tee"
                )
        return self

    def shows(self, rank: int) -> bool:
        """Tell whether the console shows this rank's output."""
        if self.ranks is None:
            return self.each_rank_dir is None
        return any(rank in one for one in self.ranks)

    @property
    def shows_servers(self) -> bool:
        """Tell whether the console shows the output of servers, whichever ranks it shows."""
        return self.each_rank_dir is None if self.ranks is None else bool(self.ranks)

    def check(self, world_size: int) -> None:
        """Errors: LaunchError if --tee names ranks that the job does not have"""
        for one in self.ranks or ():
            if one.stop > world_size and one != range(10**7):
                raise LaunchError(
                    f"--tee: there is no rank {one.stop - 1}; this job has ranks 0 to {world_size - 1}"
                )
