"""Whether a word is an address or a name. Sent to the nodes: standard library only."""

from __future__ import annotations

from _socket import AF_INET, AF_INET6, inet_pton  # what socket is made of; that takes 10 ms more

from .lean_stdlib import suppress


def is_address(word: str) -> bool:
    """Whether this is an IPv4 or IPv6 address, maybe with a zone."""
    for family in (AF_INET, AF_INET6):
        with suppress(OSError, ValueError):
            return bool(inet_pton(family, word.partition("%")[0]))
    return False
