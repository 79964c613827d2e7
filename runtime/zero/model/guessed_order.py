"""Guess of the order in which a backward finishes the gradients of units, before any order was seen.

A backward has left a unit when it comes to the next but one at the latest: while it is in one unit, the next
one is being gathered (prefetch.py). Of units that are not gathered, since they stay whole or are still here
from the forward, the place in the model says when it has left them: with the nearest unit before them that is
gathered. Parameters of the root are used anywhere, so there is no guess for them.

Where nothing is gathered, the guess is the order of the model, from the last unit to the first.

A rank asks for a place when its backward comes to another one, and at the next gather at the latest. Where
ranks exchange tokens it does so at the gather alone: all ranks have exchanged the same tokens then, and in
between a rank must not wait for one that has not finished the place, see [Note: ranks that wait for each
other's tokens]. So there is no guess at all where ranks exchange tokens and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class GuessedUnit(NamedTuple):
    """Unit of a model: the places of its gradients, and what is said of each of its gathers."""

    places: tuple[int, ...]
    gathers: tuple[str, ...]


class GuessedOrder:
    """Guessed order of one model's places. It depends on the gathers of a backward alone."""

    def __init__(self, units: Sequence[GuessedUnit], *, only_at_gathers: bool = False) -> None:
        """The last one is the root. `only_at_gathers`: places are asked for at no other time."""
        self.only_at_gathers = only_at_gathers
        self._places = [tuple(reversed(unit.places)) for unit in units]
        self._root = len(units) - 1
        self._of_gather = {what: number for number, unit in enumerate(units) for what in unit.gathers}
        self._num_gathers = [len(unit.gathers) for unit in units]
        self.begin()

    def begin(self) -> None:
        """A backward begins."""
        self._last = self._root  # unit of which all was gathered last; at first, none
        self._num_begun = 0  # gathers of the next unit
        self._gathered = {self._root}
        self._left: list[int] = []
        if not (self._of_gather or self.only_at_gathers):
            self._left = [*self._reversed(0, self._root), *self._places[self._root]]

    def pass_gather(self, what: str) -> None:
        """This is about to be gathered."""
        unit = self._of_gather.get(what, self._root)
        if unit in (self._root, self._last):
            return
        self._num_begun += 1
        if self._num_begun < self._num_gathers[unit]:
            return
        self._gathered.add(unit)
        if self._last != self._root:
            self._left += self._places_from(self._last)
        self._last, self._num_begun = unit, 0

    def take_left(self) -> list[int]:
        """Return the places that the backward has left before the next gather, without those that were
        returned earlier.
        """
        left, self._left = self._left, []
        return left

    def _places_from(self, unit: int) -> list[int]:
        """Return the places of the unit, after those of units behind it that were not gathered."""
        stop = unit + 1
        while stop not in self._gathered:
            stop += 1
        return self._reversed(unit, stop)

    def _reversed(self, start: int, stop: int) -> list[int]:
        return [index for places in reversed(self._places[start:stop]) for index in places]
