"""The partner of each host, which gets copies of its snapshots. Arithmetic only.

A partner should not fail together with its host: so it stands in another rack, if racks are known, else as
far away in the order of hosts as can be.
"""

from __future__ import annotations

from collections.abc import Sequence


def partners_of(racks: Sequence[str]) -> tuple[int | None, ...]:
    """Return the place of each host's partner, from the rack of each host (empty: not known): the next host
    of another rack, else the farthest one; None for a host that is alone.
    """
    return tuple(_partner(place, racks) for place in range(len(racks)))


def copies_on(racks: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return for each host the places of the hosts whose copies it has."""
    partners = partners_of(racks)
    return tuple(
        tuple(one for one, partner in enumerate(partners) if partner == place)
        for place in range(len(partners))
    )


def _partner(place: int, racks: Sequence[str]) -> int | None:
    num = len(racks)
    if num < 2:
        return None
    following = [(place + more) % num for more in range(1, num)]
    others = [one for one in following if racks[one] and racks[place] and racks[one] != racks[place]]
    if not others:
        return (place + num // 2) % num
    # Hosts of a rack take the hosts of another one by turns, so that no host has the copies of many.
    turn = sum(rack == racks[place] for rack in racks[:place])
    nearest = sorted(one for one in others if racks[one] == racks[others[0]])
    return nearest[turn % len(nearest)]
