"""The process groups of a pipeline's messages: two for each two ranks that send each other something.

NCCL runs the messages of a group one after the other on each rank, in the order of their issue. Were they in
one group, what a rank sends to one neighbour would hold up what it receives from another, and ranks in a
circle would wait for each other without end. Between two ranks both know the order of what one sends the
other, and each of the two directions has a group of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..comm.mesh import Axis, Lines, make_axis
from .schedule import Shape

Edge = tuple[int, int]  # two places along the pipeline, the smaller one first


class Neighbour(NamedTuple):
    """The two axes of this rank and another one."""

    to: Axis  # axis on which this rank sends
    of: Axis  # axis on which it receives

    def without_groups(self) -> None:
        """Destroy both groups."""
        self.to.without_group()
        self.of.without_group()


def edges_of(shape: Shape) -> list[Edge]:
    """Return the pairs of ranks that send each other messages."""
    pairs = {(shape.owner(stage), shape.owner(stage + 1)) for stage in range(shape.num_stages - 1)}
    return sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})


def make_neighbours(lines: Lines, shape: Shape, place: int) -> dict[int, Neighbour]:
    """Make the groups of all pipelines; return this rank's neighbours by their places.

    Order: every rank must call this in the same order
    """
    neighbours: dict[int, Neighbour] = {}
    for edges in _apart(edges_of(shape)):
        upward, downward = (make_axis(_cut(lines, edges)) for _ in range(2))
        for low, high in edges:
            if place == low:
                neighbours[high] = Neighbour(to=upward, of=downward)
            elif place == high:
                neighbours[low] = Neighbour(to=downward, of=upward)
    return neighbours


def _apart(edges: Sequence[Edge]) -> list[list[Edge]]:
    """Return them in few lists, in each of which no rank is twice: the groups of a list are made at once."""
    lists: list[list[Edge]] = []
    for edge in edges:
        fitting = (one for one in lists if not any({*edge} & {*other} for other in one))
        chosen = next(fitting, None)
        if chosen is None:
            lists.append([edge])
        else:
            chosen.append(edge)
    return lists


def _cut(lines: Lines, edges: Sequence[Edge]) -> Lines:
    """Return the two ranks of each edge in each line, and every other rank alone."""
    found: list[list[int]] = []
    for line in lines:
        found += [[line[low], line[high]] for low, high in edges]
        taken = {place for edge in edges for place in edge}
        found += [[rank] for place, rank in enumerate(line) if place not in taken]
    return found
