"""Two levels of connections: gateways are reached from here, the other hosts through a gateway.

Arithmetic only.

The hosts are cut, in their order, into groups of nearly equal size. The first host of a group is its gateway;
the others are its children, and a relay on the gateway reaches them. Every list is walked once, so the work
grows only linearly with the number of hosts. 4,000 hosts with a radix of 32 make 122 groups of 32 or 33.
There are never more than MAX_GATEWAYS groups: for more hosts all groups grow alike, so that 10,000 hosts
make 128 groups of 78 or 79.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple

from ..options.tree import TreeOptions
from .plan import NodePlan

MAX_GATEWAYS = 128


class Group(NamedTuple):
    """Hosts with one connection from here: to the gateway, which is one of the job's hosts as well."""

    gateway: NodePlan
    children: tuple[NodePlan, ...]


def plan_groups(nodes: Sequence[NodePlan], options: TreeOptions) -> tuple[Group, ...]:
    """Return the groups; none if the tree was not asked for, or there are too few hosts for it.

    Hosts that a gateway cannot reach are left out: this machine, and names such as localhost, which mean
    another machine on each host.
    """
    remote = [node for node in nodes if not node.is_local and not is_loopback(node.host.name)]
    if options.above is None or len(remote) <= options.above:
        return ()
    groups = []
    start = 0
    for size in group_sizes(len(remote), radix=options.radix):
        groups.append(Group(gateway=remote[start], children=tuple(remote[start + 1 : start + size])))
        start += size
    return tuple(groups)


def group_sizes(num_hosts: int, *, radix: int) -> tuple[int, ...]:
    """Return the number of hosts of each group, its gateway included: at most radix + 1 while there are no
    more than MAX_GATEWAYS groups.
    """
    num_groups = min(-(-num_hosts // (radix + 1)), MAX_GATEWAYS)
    return tuple(num_hosts // num_groups + (place < num_hosts % num_groups) for place in range(num_groups))


def gateways_of(groups: Sequence[Group]) -> dict[int, str]:
    """Return the gateway's name for each host behind a gateway, by node_rank."""
    return {child.node_rank: group.gateway.host.name for group in groups for child in group.children}


def is_loopback(name: str) -> bool:
    """Tell whether the name means the machine on which it is used."""
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return name.lower() == "localhost"
