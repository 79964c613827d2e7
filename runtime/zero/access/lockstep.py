"""Gathers of ranks that use a model as often as each likes: as when answers have different lengths.

To gather a unit is a collective. Inside a lockstep each rank first says which unit it wants, and all gather
the first of those, in the order of the units; a rank that wanted another one drops it, and says again what it
wants. So ranks need not know what forwards the others run, nor how many. A rank that is behind catches up,
since its unit comes first, and from there on one gather serves both. A rank that wants no more stays until no
rank wants any.

[Note: agreed routes]
Forwards mostly go the way of the one before. So with the first unit of a forward a rank also says which units
it expects to want after it. If all say the same, all gather these in that order, and no more is said; a rank
that goes another way, or ends early, takes part in the rest of them first.
"""

from __future__ import annotations

import zlib
from collections import deque
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

    def __init__(self, holders: RankGroup, device: torch.device, units: Sequence[Unit] = ()) -> None:
        self._holders, self._device = holders, device
        self._units = list(units)
        self._is_serving = False
        self._wanted: list[int] = []  # in the forward that is under way
        self._routes: dict[int, list[int]] = {}  # what earlier forwards wanted, by their first unit
        self._agreed: deque[int] = deque()  # what all ranks gather next

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
            self.follow()
            raise
        else:
            self.follow()
        finally:
            del self._units[before:]
            self._routes.clear()

    def begin_forward(self) -> None:
        """Begin a forward of a whole model.

        Order: a collective
        """
        self._end_agreed()
        self._wanted = []

    def end_forward(self) -> None:
        """End a forward that has not failed: the next one may go its way.

        Order: a collective
        """
        self._end_agreed()
        if self._wanted:
            self._routes[self._wanted[0]] = self._wanted

    def want(self, unit: Unit) -> None:
        """Return when all ranks are about to gather this unit.

        Order: a collective
        """
        if self._is_serving:
            return
        own = self._units.index(unit)
        route = [] if self._wanted else self._routes.get(own, [])
        self._wanted.append(own)
        if self._agreed and self._agreed[0] == own:
            self._agreed.popleft()
            return
        self._serve_until(own, route)

    def follow(self) -> None:
        """Want no more, and take part in the gathers of ranks that do.

        Order: a collective
        """
        self._serve_until(_NONE)

    def _serve_until(self, own: int, route: Sequence[int] = ()) -> None:
        self._end_agreed()
        while True:
            told = self._told(own, route)
            place = min((one for one, _ in told if one != _NONE), default=_NONE)
            if place == own:
                if route and len(set(told)) == 1:
                    self._agreed.extend(route[1:])
                return
            self._take_part(place)

    def _end_agreed(self) -> None:
        while self._agreed:
            self._take_part(self._agreed.popleft())

    def _take_part(self, place: int) -> None:
        self._is_serving = True
        try:
            self._units[place].take_part()
        finally:
            self._is_serving = False

    def _told(self, own: int, route: Sequence[int] = ()) -> list[tuple[int, int]]:
        """Return what each rank wants, and a number for what it expects to want then."""
        said = self._holders.all_gather_numbers(
            [own, zlib.crc32(repr(list(route)).encode()) if route else 0],
            device=self._device,
            what="which unit is gathered next",
        )
        return [(int(place), int(expected)) for place, expected in said]


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
