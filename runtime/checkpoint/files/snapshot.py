"""Copies in host memory of what a shelf holds, to be written while the originals change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from .shelf import Run, Shelf


class Memory:
    """What copies were made in, for the next ones: to get it from the system takes longer than to copy.

    One thread at a time.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, values: Tensor) -> Tensor:
        """Return a tensor in host memory that `values` can be copied into; what is in it is not defined."""
        for place, tensor in enumerate(self._free):
            if (tensor.dtype, tensor.shape) == (values.dtype, values.shape):
                return self._free.pop(place)
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Take them back."""
        self._free += tensors

    def clear(self) -> None:
        """Let go of all that is free."""
        self._free.clear()


class Snapshot:
    """Of one shelf. A copy that fails is told by who writes it: a rank may not stay away
    from a collective.
    """

    def __init__(self, shelf: Shelf, memory: Memory) -> None:
        """Copy nothing yet."""
        self._source, self._memory = shelf, memory
        self._ranges = {kind: _range(shelf, kind) for kind in {run.flat: None for run in shelf.runs}}
        self._copies: dict[str, Tensor] = {}
        self._problem: Exception | None = None
        runs: list[Run] = [replace(run, offset=run.offset - self._ranges[run.flat][0]) for run in shelf.runs]
        self.shelf = replace(
            shelf,
            runs=tuple(runs),
            flats=self._flats,
            here=lambda is_written: nullcontext(),
            exposed=frozenset(),
        )

    def take_exposed(self) -> None:
        """Copy what may change at any time."""
        self._take([kind for kind in self._ranges if kind in self._source.exposed])

    def take_rest(self) -> None:
        """Copy the rest."""
        self._take([kind for kind in self._ranges if kind not in self._source.exposed])

    @torch.no_grad()
    def _take(self, kinds: Iterable[str]) -> None:
        try:
            with self._source.here(False):
                flats = self._source.flats()
                for kind in kinds:
                    values = flats[kind][slice(*self._ranges[kind])]
                    self._copies[kind] = self._memory.take(values).copy_(values)
        except Exception as error:
            self._problem = error

    def give_back(self) -> None:
        """The copies have been written."""
        self._memory.give(self._copies.values())
        self._copies = {}

    def _flats(self) -> Mapping[str, Tensor]:
        if self._problem is not None:
            raise self._problem
        return self._copies


def _range(shelf: Shelf, kind: str) -> tuple[int, int]:
    of_kind = [run for run in shelf.runs if run.flat == kind]
    return min(run.offset for run in of_kind), max(run.offset + run.numel for run in of_kind)
