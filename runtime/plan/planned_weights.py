"""Weights that a rehearsal loads from files: names and shapes are compared as in a run, and no value is read.

A machine that is not of the job may not have the folder: then the weights count as loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import load, load_weights
from ..checkpoint.files.tensor_runs import TensorRuns
from ..checkpoint.pretrained.reader import PretrainedReader
from ..checkpoint.training_state import Training
from .memory import RunMemory
from .planned_checkpoint import LOAD


class PlannedReader(PretrainedReader):
    """A reader of headers."""

    def check_twins(self, part: int, num_parts: int) -> None:
        """Compare nothing: values are not read."""

    def read(self, all_runs: Iterable[TensorRuns]) -> None:
        """Have the memory of the runs at hand."""
        for tensor_runs in all_runs:
            if tensor_runs.runs:
                with tensor_runs.here(True):
                    tensor_runs.flats()

    def tensor(self, name: str) -> Tensor:
        """Return memory for one whole tensor."""
        found = self.tensors()[name]
        return torch.empty(found.size, dtype=found.properties.dtype, device="cpu")


def plan_loads_of_weights(memory: RunMemory) -> None:
    """Have the engines of this process load weights without values."""
    plain: Callable[..., None] = load_weights.load_weights
    replaced: Any = load_weights
    replaced.PretrainedReader = PlannedReader
    replaced.names_of_all = load._own_names

    @functools.wraps(plain)
    def planned(training: Training, path: Path, *args: Any, **options: Any) -> None:
        before = memory.phases[-1].name
        memory.begin(LOAD)
        try:
            if path.is_dir():
                plain(training, path, *args, **options)
            else:
                training.model.parked_states.note_load()
        finally:
            memory.begin(before)

    replaced.load_weights = planned
