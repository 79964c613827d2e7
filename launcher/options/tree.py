"""Whether hosts are reached through other hosts."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from ..errors import LaunchError
from .backend import OPENSSH, PDSH, SSH
from .number import Whole


class TreeOptions(NamedTuple):
    """`above` None: every host is reached from here."""

    above: int | None = None
    radix: int = 32


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--tree_above"],
        type=Whole(1),
        metavar="N",
        help=(
            "With more than N hosts behind ssh, reach most of them through others of them (gateways), which "
            "must be allowed to log in there.  [default: reach all from here]"
        ),
    ),
    click.Option(
        ["--tree_radix"],
        type=Whole(1),
        metavar="R",
        help="With --tree_above: hosts behind each gateway, at most.  [default: 32]",
    ),
)


def read(given: dict[str, Any]) -> TreeOptions:
    """The options of this file from all that were given, by parameter name.

    Errors: LaunchError where they have no meaning.
    """
    above, radix = given["tree_above"], given["tree_radix"]
    if above is None:
        if radix is not None:
            raise LaunchError(
                f"--tree_radix={radix} has no effect without --tree_above; add "
                "--tree_above=N, or leave it out"
            )
        return TreeOptions()
    if given["no_ssh"]:
        raise LaunchError(
            f"--tree_above={above} has no effect with --no_ssh, which connects to no host; leave it out"
        )
    if given["launcher"] not in (SSH, OPENSSH, PDSH):
        raise LaunchError(
            f"--tree_above={above} has no effect with --launcher={given['launcher'].name}; leave it out, "
            "or use --launcher=ssh"
        )
    return TreeOptions(above=above, radix=TreeOptions().radix if radix is None else radix)
