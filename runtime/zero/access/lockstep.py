"""Gathers of ranks that use a model as often as each likes: as when answers have different lengths.

To gather a unit is a collective. Inside a lockstep each rank first says which unit it wants, and all gather
the first of those, in the order of the units; a rank that wanted another one drops it, and says again what it
wants. So ranks need not know what forwards the others run, nor how many. A rank that is behind catches up,
since its unit comes first, and from there on one gather serves both. A rank that wants no more stays until no
rank wants any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ...comm.rank_group import RankGroup
from ...errors import CollectiveError
from ..units.unit import Unit

_NONE = -1  # said by a rank that wants no more


class Lockstep:
    """The ranks that hold the same units, in one block of the program."""

    def __init__(self, units: Sequence[Unit], holders: RankGroup, device: torch.device) -> None:
        self._units, self._holders, self._device = tuple(units), holders, device
        self._places = {unit: place for place, unit in enumerate(units)}
        self._is_serving = False

    def want(self, unit: Unit) -> None:
        """Return when all ranks are about to gather this unit.

        Order: a collective
        """
        if not self._is_serving:
            self._serve_until(self._places[unit])

    def follow(self) -> None:
        """Return when no rank wants a unit any longer.

        Order: a collective
        """
        self._serve_until(_NONE)

    def _serve_until(self, own: int) -> None:
        self._is_serving = True
        try:
            while (place := self._next(own)) != own:
                self._units[place].take_part()
        finally:
            self._is_serving = False

    def _next(self, own: int) -> int:
        said = self._holders.all_gather_numbers(
            [own], device=self._device, what="which unit is gathered next"
        )
        return min((int(place) for (place,) in said if place != _NONE), default=_NONE)


@contextmanager
def in_lockstep(units: Sequence[Unit], holders: RankGroup, device: torch.device) -> Iterator[Lockstep]:
    """Let a rank that leaves the block, by an error too, follow the others.

    Order: a collective at the end
    """
    lockstep = Lockstep(units, holders, device)
    try:
        yield lockstep
    except CollectiveError:  # the others may not be there
        raise
    except Exception:
        lockstep.follow()
        raise
    lockstep.follow()
