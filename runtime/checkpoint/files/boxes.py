"""A run of a tensor's elements as boxes: what torch.distributed.checkpoint can write and read.

Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a tensor whose elements follow each other in C order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # index of its first element in the whole tensor

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def boxes_of(shape: tuple[int, ...], start: int, stop: int, *, max_numel: int) -> Iterator[Box]:
    """Cut elements [start, stop) of a tensor of this shape into boxes of at most `max_numel`
    elements, in order.

    A run of an N-dimensional tensor is at most 2 N - 1 boxes, if `max_numel` cuts none of them. A tensor
    without elements is one box without elements.
    """
    if not shape or prod(shape) == 0:
        yield Box((0,) * len(shape), shape, 0)
        return
    yield from _cut((), shape, start, stop, 0, max_numel)


def _cut(
    prefix: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int, base: int, max_numel: int
) -> Iterator[Box]:
    """Yield the boxes of elements [start, stop) of the part of the tensor at `prefix`, which begins at
    element `base`.
    """
    row = prod(shape[1:])
    whole_rows = range(0) if row > max_numel else range(-(-start // row), stop // row)
    if len(whole_rows) == 0:  # less than a row, or more than a box can hold
        for index in range(start // row, -(-stop // row)):
            low, high = max(start - index * row, 0), min(stop - index * row, row)
            yield from _cut((*prefix, index), shape[1:], low, high, base + index * row, max_numel)
        return
    first, last = whole_rows.start, whole_rows.stop
    if start < first * row:
        yield from _cut(
            (*prefix, first - 1),
            shape[1:],
            start - (first - 1) * row,
            row,
            base + (first - 1) * row,
            max_numel,
        )
    for index in range(first, last, max_numel // row):
        count = min(max_numel // row, last - index)
        offsets = (*prefix, index, *(0 for _ in shape[1:]))
        yield Box(offsets, (*(1 for _ in prefix), count, *shape[1:]), base + index * row)
    if last * row < stop:
        yield from _cut((*prefix, last), shape[1:], 0, stop - last * row, base + last * row, max_numel)
