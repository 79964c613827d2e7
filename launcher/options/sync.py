"""Files that the hosts get before the job, and that come back afterwards."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from ..errors import LaunchError


class SyncOptions(NamedTuple):
    """`folder` None: nothing is sent. `patterns` are what comes back, into `place`."""

    folder: str | None = None
    is_forced: bool = False
    patterns: tuple[str, ...] = ()
    place: str = "collected"

    @property
    def is_on(self) -> bool:
        return self.folder is not None or bool(self.patterns)


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--sync"],
        metavar="DIR",
        help=(
            "Before the start, make DIR on every host (or its cwd= in the hostfile) as it is here, but for "
            "what .gitignore and .dslaunchignore name."
        ),
    ),
    click.Option(
        ["--sync_force"],
        is_flag=True,
        help="With --sync: overwrite files there that were changed there, or come from elsewhere.",
    ),
    click.Option(
        ["--collect"],
        multiple=True,
        metavar="GLOB",
        help=(
            "At the end, also after a failure, bring back the files that match GLOB in the job's folder on "
            "each host; may be repeated."
        ),
    ),
    click.Option(
        ["--collect_to"],
        metavar="DIR",
        help="With --collect: into DIR/HOST.  [default: collected]",
    ),
)


def read(given: dict[str, Any]) -> SyncOptions:
    """The options of this file from all that were given, by parameter name.

    Errors: LaunchError where they have no meaning
    """
    options = SyncOptions(
        folder=given["sync"],
        is_forced=given["sync_force"],
        patterns=tuple(given["collect"]),
        place=given["collect_to"] or SyncOptions().place,
    )
    if options.is_forced and options.folder is None:
        raise LaunchError("--sync_force has no effect without --sync; add --sync=DIR, or leave it out")
    if given["collect_to"] and not options.patterns:
        raise LaunchError("--collect_to has no effect without --collect; add --collect=GLOB, or leave it out")
    for pattern in options.patterns:
        if ".." in pattern.split("/"):
            raise LaunchError(
                f"--collect={pattern} has .. in it; name what is in the job's folder, or begin with /"
            )
    if options.is_on and (given["no_ssh"] or given["launcher"].starts_itself):
        what = "--no_ssh" if given["no_ssh"] else f"--launcher={given['launcher'].name}"
        option = "--collect" if options.folder is None else "--sync"
        raise LaunchError(
            f"{option} has no effect with {what}, where no connection leads from here to the hosts; leave it "
            "out, or use --launcher=ssh"
        )
    return options
