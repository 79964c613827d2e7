"""Process groups of a pipeline's messages: two for each pair of ranks that send each other messages.

On each rank NCCL runs the messages of a group one after the other, in the order of their issue. In a single
group, a message to one neighbour would delay a message from another, and ranks in a circle would wait for
each other for ever. Two ranks both know the order of the messages in one direction, so each direction has its
own group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..comm.mesh import Axis, Lines, make_axis
from .schedule import Shape

Edge = tuple[int, int]  # two places along the pipeline, the smaller one first


class Neighbour(NamedTuple):
    """The two axes between this rank and a neighbour."""

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
    """Return the edges in few lists, each of which has a rank at most once: a list's groups are
    made at once.
    """
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
    """Return, for each line, the two ranks of each edge as a line, and every other rank as a line
    of its own.
    """
    found: list[list[int]] = []
    for line in lines:
        found += [[line[low], line[high]] for low, high in edges]
        taken = {place for edge in edges for place in edge}
        found += [[rank] for place, rank in enumerate(line) if place not in taken]
    return found
