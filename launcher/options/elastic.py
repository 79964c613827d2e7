"""What may change while a job runs: which hosts there are, and how one of them says that it must go."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from ..errors import LaunchError


class ElasticOptions(NamedTuple):
    """`is_on`: the hosts may change while the job runs. The file and the command are those of each host."""

    is_on: bool = False
    notice_file: str | None = None
    notice_command: str | None = None


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--notice_file"],
        metavar="PATH",
        help=(
            "A host where PATH is there is told to go: the job saves at its next checkpoint, and goes on "
            "without it."
        ),
    ),
    click.Option(
        ["--notice_command"],
        metavar="CMD",
        help="The same for a host where this shell command, run every few seconds, ends with 0.",
    ),
)


def read(given: dict[str, Any]) -> ElasticOptions:
    """The options of this file from all that were given, by parameter name.

    Errors: LaunchError for a path that is not the same file for all of a host's processes
    """
    path = given["notice_file"]
    if path is not None and (not path.startswith(("/", "~/")) or "\0" in path):
        raise LaunchError(
            f"--notice_file={path}: each host is asked for it, so it must begin with / or ~/; write e.g. "
            "/run/maintenance"
        )
    notices = path, given["notice_command"]
    has_limit = given["max_nodes"] is not None and given["max_nodes"] != -1
    return ElasticOptions(has_limit or any(notices), *notices)
