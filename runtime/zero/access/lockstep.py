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
from ...errors import CollectiveError, ConfigError
from ..units.unit import Unit

_NONE = -1  # said by a rank that wants no more
_OPEN: list[Lockstep] = []  # that of the block around the program's line, for all blocks inside


class Lockstep:
    """The ranks that hold the same units, in one block of the program and in those inside it, which may be of
    other models.
    """

    def __init__(self, holders: RankGroup, device: torch.device) -> None:
        self._holders, self._device = holders, device
        self._units: list[Unit] = []
        self._is_serving = False

    @contextmanager
    def with_units(self, units: Sequence[Unit]) -> Iterator[None]:
        """Know these units inside, too; a rank that leaves the block, by an error too, follows the others.

        Order: a collective at the end
        """
        before = len(self._units)
        self._units += units
        try:
            yield
        except CollectiveError:  # the others may not be there
            raise
        except Exception:
            self._serve_until(_NONE)
            raise
        else:
            self._serve_until(_NONE)
        finally:
            del self._units[before:]

    def want(self, unit: Unit) -> None:
        """Return when all ranks are about to gather this unit.

        Order: a collective
        """
        if not self._is_serving:
            self._serve_until(self._units.index(unit))

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
    """Have the ranks gather these units in lockstep inside.

    Order: a collective at the end
    """
    if _OPEN:
        with _OPEN[0].with_units(units):
            yield _OPEN[0]
        return
    _OPEN.append(Lockstep(holders, device))
    try:
        with _OPEN[0].with_units(units):
            yield _OPEN[0]
    finally:
        _OPEN.clear()


def check_in_lockstep(unit: Unit, lockstep: Lockstep | None) -> None:
    """Errors: ConfigError if another model's block is open, whose ranks would not come to this gather"""
    if _OPEN and lockstep is None:
        raise ConfigError(
            f"'{unit.name}' of one model is gathered inside engine.generating(weights=\"units\") of another "
            "one, where other ranks may have no use of it; open a block of generating() for this model, too, "
            "or run it after that block"
        )
