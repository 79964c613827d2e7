"""Jobs that outlive the terminal, and their names."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import LaunchError
from .backend import Launcher
from .option import flag, option, record

MAX_NAME_LENGTH = 60
_NAME = re.compile(rf"(?![0-9]+\Z)[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_LENGTH - 1}}}")


def is_job_name(text: str) -> bool:
    """Tell whether a job may have this name."""
    return _NAME.fullmatch(text) is not None


def _job_name(value: str) -> str:
    if not is_job_name(value):
        raise ValueError(
            f"{value[:80]!r}: the name of a job is 1 to {MAX_NAME_LENGTH} letters, digits, '.', '_' and '-', "
            "begins with a letter or a digit, and is more than a number; write e.g. run-3"
        )
    return value


@record
class DetachOptions(NamedTuple):
    """`name` is empty if none was given."""

    is_on: bool = flag(
        "--detach",
        topic="detach",
        help="Return when all workers run; the job outlives the terminal. See `dslaunch jobs`.",
    )
    is_watched: bool = flag(
        "--watch",
        topic="detach",
        help="Start it as --detach does, and show it as `dslaunch top` does, until it ends.",
    )
    name: str = option(
        "--name",
        topic="detach",
        default="",
        read=_job_name,
        metavar="NAME",
        help="What `dslaunch jobs` calls the job.  [default: as the script]",
    )

    def check(self, launcher: Launcher, *, no_ssh: bool) -> None:
        """Errors: LaunchError if --watch cannot show such a job"""
        if not self.is_watched:
            return
        if self.is_on:
            raise LaunchError(
                "--watch and --detach exclude each other: one shows the job until it ends, and the other "
                "returns when it runs; leave out one of them"
            )
        why = ""
        if no_ssh:
            why = "--no_ssh, of which each part knows its own node only"
        elif launcher.starts_itself:
            why = f"--launcher={launcher.name}, which starts the ranks itself and tells nothing of them"
        if why:
            raise LaunchError(f"--watch cannot show a job with {why}; leave it out")
