"""The rank that reads the launcher's input."""

from __future__ import annotations

from ..errors import LaunchError
from ..options import Options
from ..wording import count
from .plan import NodePlan


def with_stdin(nodes: tuple[NodePlan, ...], options: Options) -> tuple[NodePlan, ...]:
    """Return the nodes; if a rank reads our stdin, its node has that rank as `stdin_rank`.

    Errors: LaunchError if the given rank is not in the job, or not on this machine
    """
    asked = options.process.stdin_rank
    world_size = sum(len(node.ranks) for node in nodes)
    rank = asked if asked is not None else 0 if world_size == 1 else None
    if rank is None or not options.process.gives_stdin:
        return nodes
    if rank >= world_size:
        raise LaunchError(
            f"--stdin={rank}: the job has {count(world_size, 'rank')}; give 0 to {world_size - 1}"
        )
    found = next(node for node in nodes if any(one.rank == rank for one in node.ranks))
    if found.host.exec_prefix:
        if asked is None:
            return nodes
        raise LaunchError(
            f"--stdin={rank}: rank {rank} runs behind exec_prefix, which passes no input on to it; leave it "
            "out, or give the rank the path of a file"
        )
    if not found.is_local:
        if asked is None or options.rendezvous.no_ssh:  # without SSH each node gets the same options
            return nodes
        raise LaunchError(
            f"--stdin={rank}: rank {rank} runs on {found.host.name}; allowed is a rank on this machine, "
            "whose input needs no way; leave it out, or start dslaunch there"
        )
    return tuple(node._replace(stdin_rank=rank if node is found else None) for node in nodes)
