"""Places of a run's recordings, and the notes of all ranks on one step.

A recording is FOLDER/PART/engineE/stepK.rankR: PART is the run's part in the comparison, E counts the engines
of the program, K the optimizer steps. Step 0 is the state before the first step.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from .tensor_file import TensorReader

# Beginnings of the tensors' names. The name of a state is that of the state, a slash, and the parameter's.
# That of a buffer is the rank's number, a slash, and the buffer's: each rank has its own.
GRADIENT, PARAMETER, STATE, OTHER, BUFFER = "gradient/", "parameter/", "state/", "other/", "buffer/"
_INDEX = re.compile(r"step(\d+)\.rank(\d+)\.json")


def place_of(folder: str | Path, part: str, engine: int, step: int, rank: int) -> Path:
    """Return the beginning of the names of one rank's files of a step."""
    return Path(folder) / part / f"engine{engine}" / f"step{step}.rank{rank}"


def num_engines(folder: str | Path, part: str) -> int:
    """Return how many engines of a run have recorded anything."""
    return len(list((Path(folder) / part).glob("engine*")))


def num_steps(folder: str | Path, part: str, engine: int) -> int:
    """Return the number of the last step that is recorded; -1 if nothing is."""
    names = (one.name for one in (Path(folder) / part / f"engine{engine}").glob("step*.json"))
    return max((int(found[1]) for name in names if (found := _INDEX.fullmatch(name))), default=-1)


class StepRecord:
    """Notes of all ranks on one step."""

    def __init__(self, folder: str | Path, part: str, engine: int, step: int) -> None:
        """Errors: OSError if nothing was recorded, or cannot be read"""
        names = (one.name for one in (Path(folder) / part / f"engine{engine}").glob(f"step{step}.rank*.json"))
        ranks = sorted(int(found[2]) for name in names if (found := _INDEX.fullmatch(name)))
        self._readers = {rank: TensorReader(place_of(folder, part, engine, step, rank)) for rank in ranks}
        if not ranks:
            raise FileNotFoundError(f"step {step} of engine {engine} is not in {folder}/{part}")
        self._rank_of = {key: rank for rank, reader in reversed(self._readers.items()) for key in reader.keys}

    @property
    def notes(self) -> dict[int, dict[str, Any]]:
        """Return the ranks' numbers, by rank."""
        return {rank: reader.notes for rank, reader in self._readers.items()}

    def names(self, kind: str) -> tuple[str, ...]:
        """Return the names of the tensors of this kind, in the order of the ranks and of what each wrote."""
        keys = (key for reader in self._readers.values() for key in reader.keys)
        return tuple(dict.fromkeys(key.removeprefix(kind) for key in keys if key.startswith(kind)))

    def has(self, kind: str, name: str) -> bool:
        return kind + name in self._rank_of

    def read(self, kind: str, name: str) -> Tensor:
        """Return a tensor, in host memory."""
        key = kind + name
        return self._readers[self._rank_of[key]].read(key)
