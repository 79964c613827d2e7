"""The job's host that this machine is, when the same command is started on all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..errors import LaunchError
from ..inputs.host import host_key
from ..node.system.address import is_address

# Whole numbers from 0 that differ from node to node, in the order in which they are asked.
VARIABLES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")
# Open MPI numbers processes, not nodes: OMPI_COMM_WORLD_NODE_RANK counts the processes of one node. With one
# process on each node the world rank is the node's.
OMPI_RANK, OMPI_LOCAL_SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"


def find_node_rank(
    given: int | None,
    *,
    selected: Sequence[str],
    pool: Sequence[str],
    environ: Mapping[str, str],
    own_names: Sequence[str],
) -> int:
    """Return the node rank of this machine: its place in `selected`, the names of the hosts that take part.

    `given` counts the selected hosts, as with DeepSpeed. A scheduler's number counts the hosts of the whole
    hostfile, `pool`, because it knows nothing of a selection. `own_names` are names and addresses of this
    machine.
    Errors: LaunchError with all tries; also if this machine is in the hostfile, but not selected.
    """
    if given is not None:
        if given >= len(selected):
            raise LaunchError(f"--node_rank={given} is not one of the {_range(selected)}; {_HINT}")
        return given
    found, tried = _from_environment(environ)
    if found is not None:
        name, number = found
        if not re.fullmatch("[0-9]{1,9}", number) or int(number) >= len(pool):
            raise LaunchError(
                f"{name}={number[:80]} is not one of the {_range(pool)} of the hostfile; correct the "
                "hostfile, or give --node_rank"
            )
        return _place(pool[int(number)], selected, why=f"{name}={number}")
    matches = _matches(pool, own_names)
    if len(matches) != 1:
        shown = ", ".join(own_names)
        how = f"{' and '.join(matches)} both fit" if matches else f"{shown}: none of these is in the hostfile"
        raise LaunchError(
            f"which node is this? Tried --node_rank (not given), {', '.join(tried)}, this host's names and "
            f"addresses ({how}); give --node_rank"
        )
    return _place(matches[0], selected, why="by its name")


_HINT = "the same number goes to one node only"


def _from_environment(environ: Mapping[str, str]) -> tuple[tuple[str, str] | None, list[str]]:
    tried: list[str] = []
    for name in VARIABLES:
        if environ.get(name):
            return (name, environ[name]), tried
        tried.append(f"{name} (not set)")
    if environ.get(OMPI_RANK):
        if environ.get(OMPI_LOCAL_SIZE) == "1":
            return (OMPI_RANK, environ[OMPI_RANK]), tried
        tried.append(f"{OMPI_RANK} (not used: mpirun runs more than one process per node)")
    else:
        tried.append(f"{OMPI_RANK} (not set)")
    return None, tried


def _place(name: str, selected: Sequence[str], *, why: str) -> int:
    if name not in selected:
        raise LaunchError(
            f"this node is {name} ({why}), which does not take part ({', '.join(selected[:8])} "
            f"do{'es' if len(selected) == 1 else ''}); change the selection, or do not start dslaunch here"
        )
    return selected.index(name)


def _matches(pool: Sequence[str], own_names: Sequence[str]) -> list[str]:
    """Return hosts with exactly one of our names; if there is none, hosts whose name is the same without a
    domain.
    """
    own = {host_key(one) for one in own_names}
    exact = [name for name in pool if host_key(name) in own]
    if exact:
        return exact
    short = {_short(one) for one in own if not is_address(one)}
    return [name for name in pool if not is_address(name) and _short(host_key(name)) in short]


def _short(name: str) -> str:
    return name.partition(".")[0]


def _range(names: Sequence[str]) -> str:
    return f"{len(names)} host{'s' if len(names) != 1 else ''}, 0 to {len(names) - 1}"
