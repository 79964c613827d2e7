"""The servers' part of a plan, and what each process of the job is told of the others.

A server is one process beside the ranks. Its number, which travels where a rank's does, follows those of the
ranks; no rank, no world size and no mesh counts it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ...shared import variables
from ..options.roles import TRAINER
from .plan import NodePlan, Plan, RankPlan, is_this_machine
from .roles import Server

_SYNTAX = re.compile(r"[;&|<>(){}`#!\n]")  # a quoted sign counts, too: the shell then stays
# Words that a shell knows and that may be no program: those of POSIX, 2.9.4 and 2.14, and of bash
_BUILT_IN = frozenset(
    re.findall(
        r"\S+",
        ". : alias bg break builtin caller case cd command continue coproc declare dirs disown enable eval "
        "exec exit export fc fg for function getopts hash help history if jobs let local mapfile popd pushd "
        "read readarray readonly return select set shift shopt source suspend time times trap type typeset "
        "ulimit umask unalias unset until wait while",
    )
)


def plan_servers(
    servers: Sequence[Server], *, first_rank: int, first_node: int, local_names: frozenset[str]
) -> tuple[NodePlan, ...]:
    """Return a node with one process for each server, numbered on from the trainers' nodes and ranks."""
    return tuple(
        NodePlan(
            node_rank=first_node + place,
            host=one.host.host,
            is_local=is_this_machine(one.host.host, local_names),
            devices=one.host.devices,
            ranks=(
                RankPlan(
                    rank=first_rank + place,
                    local_rank=0,
                    env=_variables(one.role.name, one.place),
                    arguments=("/bin/sh", "-c", _of_shell(one.role.command)),
                ),
            ),
            role=one.role.name,
        )
        for place, one in enumerate(servers)
    )


def _of_shell(command: str) -> str:
    """Return the command for a shell. A single program takes the shell's place, so that the signal that ends
    it is known, and its process id is that of the server.
    """
    first = command.split()[0]
    is_program = not _SYNTAX.search(command) and "=" not in first and first not in _BUILT_IN
    return f"exec {command}" if is_program else command


def with_role(trainers: Sequence[NodePlan]) -> tuple[NodePlan, ...]:
    """Return the trainers' nodes, each of whose ranks is told its role."""
    return tuple(
        node._replace(
            ranks=tuple(
                rank._replace(env=rank.env + _variables(TRAINER, node.node_rank)) for rank in node.ranks
            )
        )
        for node in trainers
    )


def _variables(role: str, index: int) -> tuple[tuple[str, str], ...]:
    return (variables.ROLE, role), (variables.ROLE_INDEX, str(index))


def hosts_variables(plan: Plan, address_of: Mapping[int, str]) -> dict[str, str]:
    """Return the variables with the addresses of each role, in the order of its hosts; `address_of` has them
    by node_rank. Empty for a job without roles.
    """
    found: dict[str, list[str]] = {}
    for node in plan.all_nodes if plan.servers else ():
        name = variables.HOSTS_OF + (node.role or TRAINER).upper()
        found.setdefault(name, []).append(address_of[node.node_rank])
    return {name: ",".join(addresses) for name, addresses in found.items()}
