"""The ranks of a job along the axes of its parallelism: numbers only, no process groups.

    pp   pipeline: the ranks hold other layers
    dp   data: the ranks hold the same layers, and get other samples
    sp   sequence: the same layers, and other parts of the same samples
    tp   tensor: other parts of the same layers, and the same samples

The first axis is the outermost, unless another order is given: ranks that differ by 1 are neighbours along
the last one, which so stays inside a host as long as it can.

Source: DeepSpeed 0.19.8 runtime/pipe/topology.py (order of the axes); torch.distributed.device_mesh
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

ORDER = ("pp", "dp", "sp", "tp")  # the outermost first, unless another order is given
AXES = ("pp", "dp", "ep", "sp", "tp")  # groups of ep lie among dp x sp
SEPARATOR = "-"  # stands between the axes in a written order
SAMPLES = ("dp", "sp")  # along these the ranks train the same parameters
HOLDERS = ("dp", "sp", "tp")  # along these they hold the same layers, or parts of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The size of each axis; their product is the number of ranks."""

    pp: int = 1
    dp: int = 1
    sp: int = 1
    tp: int = 1
    order: tuple[str, ...] = ORDER  # the outermost first

    def __post_init__(self) -> None:
        """Errors: ValueError for a size below 1, or an order that has not each axis once"""
        for name in ORDER:
            if self._size(name) < 1:
                raise ValueError(f"{name}={self._size(name)}: an axis has at least one rank")
        if sorted(self.order) != sorted(ORDER):
            raise ValueError(f"order {', '.join(self.order)}: must have each of {', '.join(ORDER)} once")
        # axes of one rank have no place: orders that differ in nothing else are one
        object.__setattr__(self, "order", full_order(self.order, {one: self._size(one) for one in ORDER}))

    def _size(self, name: str) -> int:
        return int(getattr(self, name))

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return prod(map(self._size, ORDER))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the rank's index along each axis.

        Errors: ValueError if there is no such rank
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of {self.world_size}")
        places: dict[str, int] = {}
        for name in reversed(self.order):
            rank, places[name] = divmod(rank, self._size(name))
        return {name: places[name] for name in ORDER}

    def place(self, rank: int) -> str:
        """Return where the rank is, for messages: "stage 1 of 2, dp 0"; without axes of one rank, and "" if
        there is none but dp.
        """
        return place_text(self.coordinates(rank), {name: self._size(name) for name in ORDER})

    @property
    def places(self) -> tuple[str, ...]:
        """Return the places of all ranks."""
        return tuple(map(self.place, range(self.world_size)))

    def rank_at(self, **coordinates: int) -> int:
        """Return the rank with this index along each axis; 0 along those that are not given.

        Errors: ValueError for an axis or an index that does not exist
        """
        unknown = sorted(coordinates.keys() - set(ORDER))
        if unknown:
            raise ValueError(f"there is no axis {unknown[0]!r}; there are {', '.join(ORDER)}")
        rank = 0
        for name in self.order:
            index, size = coordinates.get(name, 0), self._size(name)
            if not 0 <= index < size:
                raise ValueError(f"{name}={index}: the axis has {size} ranks, from 0")
            rank = rank * size + index
        return rank

    def lines(self, names: Collection[str]) -> list[tuple[int, ...]]:
        """Return all lines along these axes: ranks that differ in nothing else, in order. Each rank is in
        one of them. The lines are in the order of pp, dp, sp, tp, whichever axis is the outermost.
        """
        across = [name for name in ORDER if name not in names]
        along = [name for name in ORDER if name in names]

        def indices(axes: Collection[str]) -> list[dict[str, int]]:
            sizes = (range(self._size(axis)) for axis in axes)
            return [dict(zip(axes, one, strict=True)) for one in product(*sizes)]

        return [
            tuple(sorted(self.rank_at(**fixed, **varied) for varied in indices(along)))
            for fixed in indices(across)
        ]

    def line_of(self, rank: int, names: Collection[str]) -> tuple[int, ...]:
        """Return the line along these axes that the rank is in."""
        return next(line for line in self.lines(names) if rank in line)

    @property
    def leaders(self) -> tuple[int, ...]:
        """Return by rank the first of those that train the same parameters with other data."""
        first = {rank: line[0] for line in self.lines(SAMPLES) for rank in line}
        return tuple(first[rank] for rank in range(self.world_size))


def axes_of_job(
    world_size: int, *, pp: int = 1, sp: int = 1, tp: int = 1, order: Sequence[str] = ORDER
) -> Axes:
    """Return the axes of so many ranks: `pp` stages, in each of which `tp` neighbours hold one copy of its
    layers together, and `sp` of these have parts of the same samples. `order` may leave out axes of one rank.

    Errors: ValueError if they do not divide the ranks, or `order` leaves out another one
    """
    inner = pp * sp * tp
    if world_size % inner:
        sizes = {"pp": pp, "sp": sp, "tp": tp}
        given = " * ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        raise ValueError(f"{given} does not divide the {world_size} ranks")
    found = {"pp": pp, "dp": world_size // inner, "sp": sp, "tp": tp}
    return Axes(**found, order=full_order(order, found))


def full_order(order: Sequence[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return an order of all axes in which those with more than one rank stand as in `order`: the same one
    for all that make no difference.

    Errors: ValueError if one with more than one rank is left out
    """
    long = [name for name in ORDER if sizes[name] > 1]
    left_out = [name for name in long if name not in order]
    if left_out:
        raise ValueError(
            f"the order {', '.join(order)} leaves out {left_out[0]}, which has {sizes[left_out[0]]} ranks; "
            "name all axes with more than one rank, the outermost first"
        )
    named = [name for name in order if name in long]
    if named == long:
        return ORDER
    if "sp" not in named and "dp" in named:  # ranks with data of their own, which may yet share sequences
        named.insert(named.index("dp") + 1, "sp")
    return (*(name for name in ORDER if name not in named), *named)


def place_text(at: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    """Return a rank's indices in words, "stage 1 of 2, dp 0"; "" if only dp divides the ranks."""
    if all(size == 1 for name, size in sizes.items() if name != "dp"):
        return ""
    stage = [f"stage {at['pp']} of {sizes['pp']}"] if sizes["pp"] > 1 else []
    return ", ".join([*stage, *(f"{name} {at[name]}" for name in at if name != "pp" and sizes[name] > 1)])
