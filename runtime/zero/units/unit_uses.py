"""The order in which a forward used units: the order in which every rank gathers them in the backward.

[Note: the order of a backward]
The forwards of all ranks are the same, but their losses may reach other parts of it: one of several heads, or
none of it where a batch has no targets. A rank that gathered for its own graph alone would wait for ranks
that do not come. So each forward notes its uses of units, and a backward goes through all of them from the
last to the first: before it comes to one, it gathers those that its own graph has left out, and drops them
again; at its end, it does so with the rest. Where the graphs of all ranks reach all that a forward made, as
they nearly always do, there is not one gather more.

A checkpoint computes several units again, in the order of the forward, before it goes back through them. They
are gathered in the order of the backward all the same, and stay until the backward has left them.

What is not noted is gathered when the own graph needs it: what a checkpoint of the kind use_reentrant=True
computes again, and uses of a derivative of a derivative.
"""

from __future__ import annotations

from .unit import Unit


class UnitUses:
    """Uses of units by one forward, or by modules that are called one after the other."""

    def __init__(self) -> None:
        self._units: list[Unit] = []
        self._is_output: list[bool] = []  # a gradient comes to it by what the unit returned
        self._stays: list[bool] = []  # a checkpoint uses it outside its modules, see Access._bring
        self.is_walked = False  # a backward went through them

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._units

    def __len__(self) -> int:
        return len(self._units)

    def add(self, unit: Unit, *, is_output: bool, stays: bool = False) -> int:
        """Note one, and return its index; those of one unit after each other are one."""
        if not self._units or self._units[-1] is not unit:
            self._units.append(unit)
            self._is_output.append(is_output)
            self._stays.append(stays)
        else:
            self._is_output[-1] |= is_output
            self._stays[-1] |= stays
        return len(self._units) - 1

    def before(self, index: int, count: int) -> tuple[Unit, ...]:
        """Return so many that a backward comes to next, the nearest first."""
        return tuple(reversed(self._units[max(0, index - count) : index]))

    def find(self, unit: Unit, index: int) -> int:
        """Return where a backward at `index` comes to this unit next; `index` if it does not."""
        return next((one for one in range(index, -1, -1) if self._units[one] is unit), index)

    def at(self, index: int) -> tuple[Unit, bool, bool]:
        """Return the unit, whether it may be the only one that is kept, and whether it stays to the end."""
        return self._units[index], self._is_output[index], self._stays[index]


UnitUse = tuple[UnitUses, int]  # one use: its list and its index
