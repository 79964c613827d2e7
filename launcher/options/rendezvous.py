"""The mode without SSH, in which the same command is started on every node by another program or by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from ..errors import LaunchError
from .number import MOST, Seconds, Whole
from .text import job_id

TIMEOUT_S = 300.0


class RendezvousOptions(NamedTuple):
    """`coordinator_port` 0 means no coordinator. None means not given."""

    no_ssh: bool = False
    no_ssh_check: bool = False
    node_rank: int | None = None
    coordinator_port: int | None = None
    timeout_s: float = TIMEOUT_S
    job_id: str | None = None


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--no_ssh"],
        is_flag=True,
        help="Run this node's part only: the same command is started on every node, by you or a scheduler.",
    ),
    click.Option(
        ["--no_ssh_check"],
        is_flag=True,
        help="Accepted for DeepSpeed's scripts, without effect: there is no check apart from connecting.",
    ),
    click.Option(
        ["--node_rank"],
        type=Whole(absent=-1),
        metavar="N",
        help=(
            "With --no_ssh: which of the chosen hosts this is, from 0.  [default: as Slurm, Kubernetes or "
            "the host's name say]"
        ),
    ),
    click.Option(
        ["--coordinator_port"],
        type=Whole(0, 65535),
        metavar="PORT",
        help="With --no_ssh: port on node 0 for news of failures; 0: none.  [default: master port + 1]",
    ),
    click.Option(
        ["--rendezvous_timeout"],
        type=Seconds(1, MOST),
        metavar="S",
        help="With --no_ssh: seconds to wait for all nodes.  [default: 300]",
    ),
    click.Option(
        ["--job_id"],
        callback=job_id,
        metavar="NAME",
        help="With --no_ssh: a name for the job, so that nodes of another job are kept out.",
    ),
)
_ONLY_WITHOUT_SSH = ("node_rank", "coordinator_port", "rendezvous_timeout", "job_id")


def read(given: dict[str, Any]) -> RendezvousOptions:
    """The options of this file from all that were given, by parameter name.

    A node rank of -1 means not given.

    Errors: LaunchError for an option that has a meaning with --no_ssh only.
    """
    node_rank = None if given["node_rank"] == -1 else given["node_rank"]
    for name in _ONLY_WITHOUT_SSH:
        is_given = node_rank is not None if name == "node_rank" else given[name] is not None
        if is_given and not given["no_ssh"]:
            raise LaunchError(
                f"--{name} has a meaning with --no_ssh only; add --no_ssh if this command runs on every "
                "node, else leave it out"
            )
    return RendezvousOptions(
        no_ssh=given["no_ssh"],
        no_ssh_check=given["no_ssh_check"],
        node_rank=node_rank,
        coordinator_port=given["coordinator_port"],
        timeout_s=TIMEOUT_S if given["rendezvous_timeout"] is None else given["rendezvous_timeout"],
        job_id=given["job_id"],
    )
