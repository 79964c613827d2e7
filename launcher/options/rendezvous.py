"""The mode without SSH, in which the same command is started on every node by another program or by hand."""

from __future__ import annotations

from typing import NamedTuple

from . import text
from .number import MOST, Seconds, Whole
from .option import flag, option, record


@record
class RendezvousOptions(NamedTuple):
    """`coordinator_port` 0 means no coordinator. None means not given."""

    no_ssh: bool = flag(
        "--no_ssh",
        topic="launchers",
        help="Run this node's part only: the same command is started on every node, by you or a scheduler.",
    )
    no_ssh_check: bool = flag(
        "--no_ssh_check",
        topic="deepspeed",
        help="Accepted for DeepSpeed's scripts, without effect: there is no check apart from connecting.",
    )
    node_rank: int | None = option(
        "--node_rank",
        topic="launchers",
        needs="--no_ssh",
        type=Whole(absent=-1),
        absent=-1,
        metavar="N",
        help=(
            "With --no_ssh: which of the chosen hosts this is, from 0.  [default: as Slurm, Kubernetes or "
            "the host's name say]"
        ),
    )
    coordinator_port: int | None = option(
        "--coordinator_port",
        topic="launchers",
        needs="--no_ssh",
        type=Whole(0, 65535),
        metavar="PORT",
        help="With --no_ssh: port on node 0 for news of failures; 0: none.  [default: master port + 1]",
    )
    timeout_s: float = option(
        "--rendezvous_timeout",
        topic="launchers",
        needs="--no_ssh",
        default=300.0,
        type=Seconds(1, MOST),
        metavar="S",
        help="With --no_ssh: seconds to wait for all nodes.  [default: 300]",
    )
    job_id: str | None = option(
        "--job_id",
        topic="launchers",
        needs="--no_ssh",
        read=text.job_id,
        metavar="NAME",
        help="With --no_ssh: a name for the job, so that nodes of another job are kept out.",
    )
