"""The address at which all other ranks reach rank 0."""

from __future__ import annotations

import ipaddress

from ..node.system.address import is_address

LOOPBACK = "127.0.0.1"


def master_address(*, is_one_machine: bool, reached_at: str, address_to_peers: str, hostname: str) -> str:
    """Return node 0's address for MASTER_ADDR if the user gave none.

    `reached_at` is the address by which SSH reached node 0 (empty if node 0 is this machine),
    `address_to_peers` this machine's own address on its connections to the other nodes (empty if there is a
    proxy between). Nothing is guessed from a list of interfaces: the first one is often a bridge that no
    other host can reach.
    """
    if is_one_machine:
        return LOOPBACK
    if not is_address(reached_at):  # sshd writes UNKNOWN if it does not know the address
        reached_at = ""
    for address in (reached_at, address_to_peers):
        if is_for_others(address):
            return address.partition("%")[0]
    are_all_loopback = bool(address_to_peers)
    return (reached_at or LOOPBACK) if are_all_loopback else hostname


def is_for_others(address: str) -> bool:
    """Tell whether other machines can use this address, too: it is not a loopback address."""
    return is_address(address) and not ipaddress.ip_address(address.partition("%")[0]).is_loopback
