"""Cuts of a tensor that is divided over ranks: arithmetic, and copies.

A part consists of pieces of the whole along one dimension. Usually it is one piece, as torch's Shard cuts.
Where several tensors were put together along that dimension (packed: for example gate and up, or q, k and v),
each of them is cut for itself, and the part has one piece of each.

Source: torch 2.13 distributed/tensor/placement_types.py, `Shard` and `_StridedShard`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of indices along the dimension that is cut."""

    offset: int  # index of its start in the whole
    at: int  # index of its start in the part
    size: int


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank's part of a tensor: its pieces, in the part's order."""

    shape: tuple[int, ...]  # shape of the whole
    dim: int
    pieces: tuple[Piece, ...]

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return self._with_size(sum(piece.size for piece in self.pieces))

    def take(self, whole: Tensor) -> Tensor:
        """Return a copy of the part of `whole`."""
        part = whole.new_empty(self.part_shape)
        for piece in self.pieces:
            source = whole.narrow(self.dim, piece.offset, piece.size)
            part.narrow(self.dim, piece.at, piece.size).copy_(source)
        return part

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write the part to its place in `whole`."""
        for piece in self.pieces:
            source = part.narrow(self.dim, piece.at, piece.size)
            whole.narrow(self.dim, piece.offset, piece.size).copy_(source)

    def boxes(
        self, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Yield, for each box in the whole that a box of the part is made of, its offsets there, and the
        first index along `dim` and the size that it has in the part's box.
        """
        dim, start = self.dim, offsets[self.dim]
        for piece in self.pieces:
            low, high = max(start, piece.at), min(start + sizes[dim], piece.at + piece.size)
            if low < high:
                moved = low - piece.at + piece.offset
                yield (*offsets[:dim], moved, *offsets[dim + 1 :]), low - start, high - low

    def _with_size(self, size: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


def cut_evenly(
    shape: Sequence[int], dim: int, *, index: int, size: int, packs: Sequence[int] | None = None
) -> Cut:
    """Return part `index` of `size`. Parts have equally many rows along `dim`; the last ones have fewer if
    `size` does not divide the rows. `packs` are the sizes along `dim` of tensors that were put together; by
    default there is one.

    Errors: ValueError unless `packs` add up to the whole
    """
    dim = dim % len(shape)
    packed = list(packs or [shape[dim]])
    if sum(packed) != shape[dim]:
        raise ValueError(f"parts of {packed} along dimension {dim} are not the whole of {tuple(shape)}")
    runs = [_run(pack, index, size) for pack in packed]
    starts = accumulate(packed, initial=0)
    ats = accumulate((stop - start for start, stop in runs), initial=0)
    return Cut(
        tuple(shape),
        dim,
        tuple(
            Piece(first + start, at, stop - start)
            for first, at, (start, stop) in zip(starts, ats, runs, strict=False)
        ),
    )


def _run(length: int, index: int, size: int) -> tuple[int, int]:
    step = -(-length // size)
    return min(index * step, length), min((index + 1) * step, length)


def are_whole(cuts: Sequence[Cut]) -> bool:
    """Tell whether the parts of all ranks make up the whole, with each index once."""
    pieces = sorted(
        (piece for cut in cuts for piece in cut.pieces if piece.size), key=lambda piece: piece.offset
    )
    ends = [0, *(piece.offset + piece.size for piece in pieces)]
    is_gapless = all(piece.offset == end for piece, end in zip(pieces, ends, strict=False))
    return (
        len({(cut.shape, cut.dim) for cut in cuts}) == 1
        and is_gapless
        and ends[-1] == cuts[0].shape[cuts[0].dim]
    )
