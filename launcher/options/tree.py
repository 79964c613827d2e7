"""Hosts that are reached through other hosts."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import LaunchError
from .backend import OPENSSH, PDSH, SSH, Launcher
from .number import Whole
from .option import option, record


@record
class TreeOptions(NamedTuple):
    """`above` None: every host is reached from here."""

    above: int | None = option(
        "--tree_above",
        topic="start",
        type=Whole(1),
        metavar="N",
        help=(
            "With more than N hosts behind ssh, reach most of them through others of them (gateways), which "
            "must be allowed to log in there.  [default: reach all from here]"
        ),
    )
    radix: int = option(
        "--tree_radix",
        topic="start",
        needs="--tree_above",
        default=32,
        type=Whole(1),
        metavar="R",
        help="With --tree_above: hosts behind each gateway, at most.  [default: 32]",
    )

    def check(self, launcher: Launcher, *, no_ssh: bool) -> None:
        """Errors: LaunchError where there are no gateways"""
        if self.above is None:
            return
        if no_ssh:
            raise LaunchError(
                f"--tree_above={self.above} has no effect with --no_ssh, which connects to no host; leave it "
                "out"
            )
        if launcher not in (SSH, OPENSSH, PDSH):
            raise LaunchError(
                f"--tree_above={self.above} has no effect with --launcher={launcher.name}; leave it out, "
                "or use --launcher=ssh"
            )
