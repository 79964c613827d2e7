"""Which hosts take part and how to reach them: the options that every command with hosts has."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import click

from .exec_prefix import OPTION as EXEC_PREFIX
from .number import PORT, Seconds, Whole
from .text import user

MAX_STEPS = 6  # of a connection: attempts, and hosts on the way


class SshOptions(NamedTuple):
    """How to reach hosts; a value in the hostfile wins, then these, then ~/.ssh/config,
    then SSH's defaults.
    """

    port: int | None = None
    user: str | None = None
    identity: str | None = None
    config: str | None = None
    connect_timeout_s: float | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """The names of those options that were given."""
        values = {
            "--ssh_port": self.port,
            "--ssh_user": self.user,
            "--ssh_identity": self.identity,
            "--ssh_config": self.config,
            "--connect_timeout": self.connect_timeout_s,
        }
        return tuple(name for name, value in values.items() if value is not None)

    def all_steps_s(self, at_least_s: float) -> float:
        """For all steps of one connection together, each of which has --connect_timeout."""
        return max(at_least_s, MAX_STEPS * (self.connect_timeout_s or 0.0))


NUM_NODES = Whole(0, absent=-1, meaning=" (0: no limit)")
NODE_LIMIT = Whole(1, absent=-1)  # the smallest or largest number of hosts of a job
NODE_RANGE = f"{__name__}.node_range"  # where a context keeps the MIN:MAX of --num_nodes


def _num_nodes(context: click.Context, parameter: click.Parameter, value: str) -> int:
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
    context.meta[NODE_RANGE] = tuple(numbers)
    return -1


CHOICE_OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["-H", "--hostfile"],
        metavar="FILE",
        help="Hosts and slots: a file, -, or a list.  [default: /job/hostfile, or a batch system's]",
    ),
    click.Option(
        ["-i", "--include"], default="", metavar="HOSTS", help="Use only these: host[:slot,...][@host...]."
    ),
    click.Option(["-e", "--exclude"], default="", metavar="HOSTS", help="Use all but these; same form."),
    click.Option(
        ["--num_nodes"],
        default="-1",
        callback=_num_nodes,
        metavar="N",
        help="Use the first N hosts, or of a job MIN:MAX of them.",
    ),
    EXEC_PREFIX,
)
SSH_OPTIONS: tuple[click.Option, ...] = (
    click.Option(["--ssh_port"], type=PORT, metavar="PORT", help="SSH port of every host."),
    click.Option(["--ssh_user"], callback=user, metavar="NAME", help="User to log in as."),
    click.Option(["--ssh_identity"], metavar="FILE", help="Private key to log in with."),
    click.Option(["--ssh_config"], metavar="FILE", help="SSH configuration to use instead of ~/.ssh/config."),
    click.Option(
        ["--connect_timeout"],
        type=Seconds(),
        metavar="S",
        help="Seconds to wait for a host to answer.  [default: as ~/.ssh/config says, else 10]",
    ),
)


def read_ssh(given: dict[str, Any]) -> SshOptions:
    """The SSH options from all that were given, by parameter name."""
    return SshOptions(
        port=given["ssh_port"],
        user=given["ssh_user"],
        identity=given["ssh_identity"],
        config=given["ssh_config"],
        connect_timeout_s=given["connect_timeout"],
    )
