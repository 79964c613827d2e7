"""Files that the hosts get before the job, and that come back afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import LaunchError
from .backend import Launcher
from .option import flag, option, record


@record
class SyncOptions(NamedTuple):
    """`folder` None: no files are sent. `patterns` select the files to collect into `place`."""

    folder: str | None = option(
        "--sync",
        topic="files",
        metavar="DIR",
        help=(
            "Before the start, make DIR on every host (or its cwd= in the hostfile) as it is here, but for "
            "what .gitignore and .dslaunchignore name."
        ),
    )
    is_forced: bool = flag(
        "--sync_force",
        topic="files",
        needs="--sync",
        help="With --sync: overwrite files there that were changed there, or come from elsewhere.",
    )
    patterns: tuple[str, ...] = option(
        "--collect",
        topic="files",
        default=(),
        multiple=True,
        metavar="GLOB",
        help=(
            "At the end, also after a failure, bring back the files that match GLOB in the job's folder on "
            "each host; may be repeated."
        ),
    )
    place: str = option(
        "--collect_to",
        topic="files",
        needs="--collect",
        default="collected",
        metavar="DIR",
        help="With --collect: into DIR/HOST.  [default: collected]",
    )

    @property
    def is_on(self) -> bool:
        return self.folder is not None or bool(self.patterns)

    def settled(self, given: Mapping[str, Any]) -> SyncOptions:
        """Settle the options. Errors: LaunchError for a pattern that leads out of the job's folder"""
        for pattern in self.patterns:
            if ".." in pattern.split("/"):
                raise LaunchError(
                    f"--collect={pattern} has .. in it; name what is in the job's folder, or begin with /"
                )
        return self

    def check(self, launcher: Launcher, *, no_ssh: bool) -> None:
        """Errors: LaunchError where no files can be sent"""
        if self.is_on and (no_ssh or launcher.starts_itself):
            what = "--no_ssh" if no_ssh else f"--launcher={launcher.name}"
            name = "--collect" if self.folder is None else "--sync"
            raise LaunchError(
                f"{name} has no effect with {what}, where no connection leads from here to the hosts; leave "
                "it out, or use --launcher=ssh"
            )
