"""Copies in host memory of what a shelf holds, to be written while the originals change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from .shelf import Run, Shelf


class Snapshot:
    """Of one shelf. A copy that fails is told by who writes it: a rank may not stay away from a collective."""

    def __init__(self, shelf: Shelf) -> None:
        """Take no memory yet."""
        self._source = shelf
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
                    self._copies[kind] = _copied(flats[kind][slice(*self._ranges[kind])])
        except Exception as error:
            self._problem = error

    def _flats(self) -> Mapping[str, Tensor]:
        if self._problem is not None:
            raise self._problem
        return self._copies


def _range(shelf: Shelf, kind: str) -> tuple[int, int]:
    of_kind = [run for run in shelf.runs if run.flat == kind]
    return min(run.offset for run in of_kind), max(run.offset + run.numel for run in of_kind)


def _copied(values: Tensor) -> Tensor:
    # Either allocator keeps what is freed for the next save: to get new memory from the system takes longer than to copy.
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda).copy_(values)
