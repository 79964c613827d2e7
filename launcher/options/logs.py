"""Where the output of the ranks goes, and how it looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import click

from ..errors import LaunchError
from ..inputs.line_prefix import FIELDS, check_template
from ..inputs.rank_set import parse_ranks


class LogOptions(NamedTuple):
    """None means not given. `ranks` are those that the console shows."""

    log_dir: str | None = None
    each_rank_dir: str | None = None
    ranks: tuple[range, ...] | None = None
    prefix: str | None = None
    has_timestamps: bool = False
    is_folding: bool = False
    folds_failures: bool = True

    def shows(self, rank: int) -> bool:
        """Whether the console shows what this rank writes."""
        if self.ranks is None:
            return self.each_rank_dir is None
        return any(rank in one for one in self.ranks)

    def refuse(self, why: str) -> None:
        """Errors: LaunchError if any of this was asked for where it can have no effect"""
        for option, is_given in (
            ("--log_dir", self.log_dir is not None),
            ("--tee", self.ranks is not None),
            ("--prefix", self.prefix is not None),
            ("--timestamps", self.has_timestamps),
            ("--fold", self.is_folding),
            ("--fold_failures", not self.folds_failures),
            ("--enable_each_rank_log", self.each_rank_dir is not None),
        ):
            if is_given:
                raise LaunchError(f"{option} has no effect with {why}; leave it out")

    def check(self, world_size: int) -> None:
        """Errors: LaunchError if --tee names ranks that the job does not have"""
        for one in self.ranks or ():
            if one.stop > world_size and one != range(10**7):
                raise LaunchError(
                    f"--tee: there is no rank {one.stop - 1}; this job has ranks 0 to {world_size - 1}"
                )


def _checked(check: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    def callback(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        if value is not None:
            try:
                check(value)
            except ValueError as error:
                raise click.BadParameter(str(error)) from None
        return value

    return callback


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--log_dir"],
        metavar="DIR",
        help="Keep each rank's output, and the report, in DIR/<run>.",
    ),
    click.Option(
        ["--tee", "--ranks"],
        metavar="RANKS",
        callback=_checked(parse_ranks),
        help="Show only these ranks: 0,4-7, or all, or none.  [default: all]",
    ),
    click.Option(
        ["--prefix"],
        metavar="TEMPLATE",
        callback=_checked(check_template),
        help=f"What stands before each line; fields: {', '.join(FIELDS)}.  [default: '{{host}}:{{rank}} |']",
    ),
    click.Option(["--timestamps"], is_flag=True, help="Show when each line arrived."),
    click.Option(
        ["--fold"], is_flag=True, help="Show a line that several ranks write at one time only once."
    ),
    click.Option(
        ["--fold_failures"],
        type=click.Choice(["yes", "no"]),
        default="yes",
        help="Show one line of each rank that only lost another one, not its traceback.  [default: yes]",
    ),
    click.Option(
        ["--enable_each_rank_log"],
        metavar="DIR",
        help="Write each rank's output to DIR/<time>_rank<rank>.log, and show none.",
    ),
)


def read(given: dict[str, Any]) -> LogOptions:
    """The options of this file from all that were given, by parameter name.

    Errors: LaunchError if one of them would have no effect
    """
    each_rank_dir = given["enable_each_rank_log"]
    logs = LogOptions(
        log_dir=given["log_dir"],
        each_rank_dir=None if each_rank_dir == "None" else each_rank_dir,
        ranks=None if given["tee"] is None else parse_ranks(given["tee"]),
        prefix=given["prefix"],
        has_timestamps=given["timestamps"],
        is_folding=given["fold"],
        folds_failures=given["fold_failures"] == "yes",
    )
    if logs.is_folding and logs.prefix:
        raise LaunchError(
            "--fold and --prefix exclude each other: a folded line has a prefix of its own; give one of them"
        )
    shows_none = logs.ranks == () or (logs.ranks is None and logs.each_rank_dir is not None)
    without_effect = [
        name
        for name, is_given in (
            ("--fold", logs.is_folding),
            ("--prefix", logs.prefix is not None),
            ("--timestamps", logs.has_timestamps),
        )
        if is_given and shows_none
    ]
    if without_effect:
        raise LaunchError(
            f"{without_effect[0]} has no effect, because no rank is shown; leave it out, or "
            "show some with --tee"
        )
    return logs
