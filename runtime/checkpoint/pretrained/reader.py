"""Weights in transformers' format, as if they were one of our checkpoints: a model's names and shapes, and
no optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from ...errors import CheckpointError
from ..files.boxes import boxes_of
from ..files.tensor_runs import MODEL, TensorRuns, model_name
from .folder import PretrainedFolder
from .lazy import Sizes, Values

_COMPARED_NUMEL = 4 << 20  # elements at a time
_FRACTIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Matched(NamedTuple):
    """Values by the names of a model's state_dict."""

    values: Mapping[str, Values]
    unexpected: Collection[str]  # names in files that lead to no name of the model
    may_be_missing: Collection[str]  # names of the model that files need not have
    # names in files of what is one tensor in the model: those that are read, and the others
    twins: Sequence[tuple[str, str]] = ()


class Match(Protocol):
    """A way from the names in files to those of a model."""

    def __call__(self, found: Mapping[str, Values], where: str) -> Matched:
        """Return what the model takes of these values.

        Errors: CheckpointError, which begins with `where`, if they do not fit
        """


class PretrainedReader:
    """The weights of a folder; see OpenCheckpoint."""

    def __init__(self, path: Path, match: Match, buffers: Collection[str]) -> None:
        """`buffers`: names of the model that lie in no unit.

        Errors: CheckpointError if files are missing or damaged, or do not fit
        """
        self.tag = path.name
        self.place = self.where = str(path)
        self._folder = PretrainedFolder(path)
        matched = match(self._folder.values, self.where)
        self._values = {model_name(name): values for name, values in matched.values.items()}
        shown = self._values | {model_name(name): self._folder.values[name] for name in matched.unexpected}
        self._metadata = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=values.dtype), size=torch.Size(values.shape), chunks=[]
            )
            for name, values in shown.items()
        }
        for name in matched.values:
            if name not in buffers:
                self._check_dtype(name, matched.values[name])
        self._twins = matched.twins
        self._saved: dict[str, Any] = {
            "buffers": [name for name in buffers if name in matched.values],
            "left_out": sorted(set(matched.may_be_missing) - set(matched.values)),
            "aliases": {},
            "extra_state": {},
            "client_state": {},
            "optimizer": None,
            "scheduler": None,
        }

    @property
    def fingerprint(self) -> str:
        """A short text that is the same for the same files."""
        return self._folder.fingerprint

    def check_twins(self, part: int, num_parts: int) -> None:
        """Check that what the model has once is the same everywhere in the files; of each tensor this reads
        one of `num_parts` parts.

        Errors: CheckpointError
        """
        for names in self._twins:
            one, other = (self._folder.values[name] for name in names)
            if one.shape != other.shape or not all(
                torch.equal(one.box(offsets, sizes), other.box(offsets, sizes))
                for offsets, sizes in _part_of(one, part, num_parts)
            ):
                raise CheckpointError(
                    f"{self.where} has other values of '{names[0]}' than of '{names[1]}', which are one "
                    "parameter in the model; make the model with tie_word_embeddings=False"
                )

    def close(self) -> None:
        """Close all files."""
        self._folder.close()

    def training(self) -> dict[str, Any]:
        """Return all but the tensors: nothing was trained."""
        return self._saved

    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        """Return the name, shape (`size`) and dtype (`properties.dtype`) of every tensor."""
        return self._metadata

    def check(self, all_runs: Iterable[TensorRuns], names: Iterable[str] = ()) -> None:
        """Check nothing more: headers and sizes of all files were read at once, and there are no digests."""

    @torch.no_grad()
    def read(self, all_runs: Iterable[TensorRuns]) -> None:
        """Fill the runs of these; of a tensor of another dtype, with rounded values.

        Errors: CheckpointError that names the file if it cannot be read
        """
        for tensor_runs in all_runs:
            if tensor_runs.runs:
                with tensor_runs.here(True):
                    flats = tensor_runs.flats()
                    for run in tensor_runs.runs:
                        for box in run.boxes(max_numel=max(1, run.numel)):
                            self._values[run.name].fill(box.of(flats[run.flat]), box.offsets)

    @torch.no_grad()
    def tensor(self, name: str) -> Tensor:
        """Return one whole tensor, in host memory."""
        return self._values[name].whole()

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state_dict, whole and in host memory."""
        return {name[len(MODEL) :]: self.tensor(name) for name in self._values}

    def _check_dtype(self, name: str, values: Values) -> None:
        """Errors: CheckpointError for numbers that mean something together with others only"""
        if values.dtype not in _FRACTIONS:
            raise CheckpointError(
                f"{self.where}: '{name}' is of {values.dtype}, which is a number of a quantized weight; give "
                "initialize() the model that from_pretrained() makes of this folder"
            )


def _part_of(values: Values, part: int, num_parts: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Yield offsets and sizes of boxes that make up this part."""
    numel = prod(values.shape)
    bounds = [number * numel // num_parts for number in (part, part + 1)]
    for box in boxes_of(values.shape, bounds[0], bounds[1], max_numel=_COMPARED_NUMEL):
        yield box.offsets, box.sizes
