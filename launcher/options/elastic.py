"""Changes of the hosts while a job runs, and how a host tells that it must leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import LaunchError
from .option import option, record


@record
class ElasticOptions(NamedTuple):
    """`is_on`: the hosts may change while the job runs. The file and the command are looked for on each
    host.
    """

    is_on: bool = False
    notice_file: str | None = option(
        "--notice_file",
        topic="elastic",
        metavar="PATH",
        help=(
            "A host where PATH is there is told to go: the job saves at its next checkpoint, and goes on "
            "without it."
        ),
    )
    notice_command: str | None = option(
        "--notice_command",
        topic="elastic",
        metavar="CMD",
        help="The same for a host where this shell command, run every few seconds, ends with 0.",
    )

    def settled(self, given: Mapping[str, Any]) -> ElasticOptions:
        """Settle the options. Errors: LaunchError for a path that is not the same file for all processes of
        a host
        """
        path = self.notice_file
        if path is not None and (not path.startswith(("/", "~/")) or "\0" in path):
            raise LaunchError(
                f"--notice_file={path}: each host is asked for it, so it must begin with / or ~/; write e.g. "
                "/run/maintenance"
            )
        has_limit = given.get("max_nodes") not in (None, -1)
        return self._replace(is_on=has_limit or bool(path) or bool(self.notice_command))
