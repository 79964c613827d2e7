"""Addresses, told apart from names."""

from __future__ import annotations

from _socket import AF_INET, AF_INET6, inet_pton  # socket is made of it, and takes 10 ms more

from .lean_stdlib import suppress


def is_address(word: str) -> bool:
    """Tell whether this is an IPv4 or IPv6 address, maybe with a zone."""
    for family in (AF_INET, AF_INET6):
        with suppress(OSError, ValueError):
            return bool(inet_pton(family, word.partition("%")[0]))
    return False
