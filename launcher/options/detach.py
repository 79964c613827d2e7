"""Whether a job outlives the terminal, and what it is called."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import click

from ..errors import LaunchError

MAX_NAME_LENGTH = 60
_NAME = re.compile(rf"(?![0-9]+\Z)[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_LENGTH - 1}}}")


class DetachOptions(NamedTuple):
    """`name` is empty if none was given."""

    is_on: bool = False
    name: str = ""
    is_watched: bool = False  # starts as with is_on, and the command shows it


def is_job_name(text: str) -> bool:
    """Whether a job may be called so."""
    return _NAME.fullmatch(text) is not None


def _checked(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not is_job_name(value):
        raise click.BadParameter(
            f"{value[:80]!r}: the name of a job is 1 to {MAX_NAME_LENGTH} letters, digits, '.', '_' and '-', "
            "begins with a letter or a digit, and is more than a number; write e.g. run-3"
        )
    return value


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--detach"],
        is_flag=True,
        help="Return when all workers run; the job outlives the terminal. See `dslaunch jobs`.",
    ),
    click.Option(
        ["--watch"],
        is_flag=True,
        help="Start it as --detach does, and show it as `dslaunch top` does, until it ends.",
    ),
    click.Option(
        ["--name"],
        metavar="NAME",
        callback=_checked,
        help="What `dslaunch jobs` calls the job.  [default: as the script]",
    ),
)


def read(given: dict[str, Any]) -> DetachOptions:
    """The options of this file from all that were given, by parameter name.

    Errors: LaunchError if --watch cannot show such a job
    """
    if given["watch"]:
        _check_watch(given)
    return DetachOptions(is_on=given["detach"], name=given["name"] or "", is_watched=given["watch"])


def _check_watch(given: dict[str, Any]) -> None:
    if given["detach"]:
        raise LaunchError(
            "--watch and --detach exclude each other: one shows the job until it ends, and the other returns "
            "when it runs; leave out one of them"
        )
    launcher = given["launcher"]
    why = ""
    if given["no_ssh"]:
        why = "--no_ssh, of which each part knows its own node only"
    elif launcher.starts_itself:
        why = f"--launcher={launcher.name}, which starts the ranks itself and tells nothing of them"
    if why:
        raise LaunchError(f"--watch cannot show a job with {why}; leave it out")
