"""Where rank 0 can be reached by all the others."""

from __future__ import annotations

import ipaddress

LOOPBACK = "127.0.0.1"


def master_address(*, is_single_node: bool, reached_at: str, hostname: str, address_to_peers: str) -> str:
    """Node 0's address for MASTER_ADDR when none was asked for.

    `reached_at` is the address by which SSH reached node 0 (empty if it is this machine), `address_to_peers` this
    machine's own address on its connections to the other nodes. Nothing is guessed from a list of interfaces: the
    first one is often a bridge that nobody else can reach.
    """
    if is_single_node:
        return LOOPBACK
    for address in (reached_at, address_to_peers):
        if address and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return address.partition("%")[0]
    return hostname if address_to_peers or reached_at else LOOPBACK
