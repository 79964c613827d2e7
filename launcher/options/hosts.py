"""The number of hosts that take part, and the way to reach them."""

from __future__ import annotations

import re
from typing import NamedTuple

import click

from . import text
from .number import PORT, Seconds, Whole
from .option import option, record

MAX_STEPS = 6  # steps of a connection: attempts, and hosts on the way


@record
class SshOptions(NamedTuple):
    """The way to reach hosts: the values of a hostfile win, then come these, then ~/.ssh/config, then SSH's
    defaults.
    """

    user: str | None = option(
        "--ssh_user", topic="hosts", read=text.user, metavar="NAME", help="User to log in as."
    )
    port: int | None = option(
        "--ssh_port", topic="hosts", type=PORT, metavar="PORT", help="SSH port of every host."
    )
    identity: str | None = option(
        "--ssh_identity", topic="hosts", metavar="FILE", help="Private key to log in with."
    )
    config: str | None = option(
        "--ssh_config",
        topic="hosts",
        metavar="FILE",
        help="SSH configuration to use instead of ~/.ssh/config.",
    )
    connect_timeout_s: float | None = option(
        "--connect_timeout",
        topic="hosts",
        type=Seconds(),
        metavar="S",
        help="Seconds to wait for a host to answer.  [default: as ~/.ssh/config says, else 10]",
    )

    def all_steps_s(self, at_least_s: float) -> float:
        """Return the time for all steps of one connection together, each of which has --connect_timeout."""
        return max(at_least_s, MAX_STEPS * (self.connect_timeout_s or 0.0))


NUM_NODES = Whole(0, absent=-1, meaning=" (0: no limit)")
NODE_LIMIT = Whole(1, absent=-1)  # the smallest or largest number of hosts of a job
NODE_RANGE = f"{__name__}.node_range"  # key under which click's context keeps the MIN:MAX of --num_nodes


def num_nodes(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Return the number of hosts; None for MIN:MAX, whose two numbers are kept in the context.

    Errors: click.BadParameter
    """
    if value is None:
        return None
    words = value.split(":")
    if len(words) > 2 or not all(re.fullmatch(r"\s*-?[0-9]+\s*", word) for word in words):
        raise click.BadParameter(f"{value!r} is neither a number nor MIN:MAX; write e.g. 4 or 2:4")
    if len(words) == 1:
        return NUM_NODES.convert(value, parameter, context)
    numbers = [NODE_LIMIT.convert(word, parameter, context) for word in words]
    if all(one.name != "min_nodes" for one in context.command.params):
        raise click.BadParameter(
            f"{value!r}: only a job has a smallest number of hosts; write e.g. {numbers[1]}"
        )
    if numbers[0] > numbers[1]:
        raise click.BadParameter(f"{value!r}: MIN is more than MAX; write {numbers[1]}:{numbers[0]}")
    context.meta[NODE_RANGE] = tuple(numbers)
    return None
