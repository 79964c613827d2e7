"""Reading what writer.py wrote: the boxes that this rank needs anything of, each checked against its digest.

No collective.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ...errors import CheckpointError
from ..storage.store import Store
from .archive import SpanReader, tensor_in
from .format import TRAINING_FILE
from .manifest import check_bytes, read_manifest
from .tensor_runs import MODEL, PlacedBox, TensorRun, TensorRuns
from .writer import METADATA

# All classes that `.metadata` may name; a pickle runs whatever it names.
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": (
        "Size",
        "device",
        *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)),
    ),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which belongs in no checkpoint")
        return super().find_class(module, name)


class CheckpointReader:
    """One checkpoint, whole as far as sizes tell.

    Errors: CheckpointError if it is not there, or damaged
    """

    def __init__(self, store: Store, tag: str) -> None:
        self.tag = tag
        self.manifest = read_manifest(store, tag)
        self._store, self._folder = store, store.folder_of(tag)
        self._reader = SpanReader()
        self.place, self.where = (f"{one}/{self._folder}" for one in (store.place, store.where))
        self._spans = {
            (name, span.offset): span for name, spans in self.manifest.files.items() for span in spans
        }
        try:
            self._metadata: Metadata = _Unpickler(io.BytesIO(self.file(METADATA))).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{self.where}/{METADATA} cannot be read: {error}") from error
        self._tensors = {
            name: found
            for name, found in self._metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }

    def file(self, name: str) -> bytes:
        """Return the bytes of a small file.

        Errors: CheckpointError if they are not those that were written
        """
        span = self._spans.get((name, 0))
        if span is None:
            raise CheckpointError(f"{self.where} has no {name}: another program wrote it, or it is damaged")
        with self._told(name):
            data = self._store.get(f"{self._folder}/{name}")
            check_bytes(data, span, where=f"{self.where}/{name}")
        return data

    def training(self) -> dict[str, Any]:
        """Return all but the tensors of the model and the optimizer. See "One checkpoint" in format.py."""
        data = self.file(TRAINING_FILE)
        try:
            training: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise CheckpointError(f"{self.where}/{TRAINING_FILE} cannot be read: {error}") from error
        return training

    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        """Return the name, shape (`size`) and dtype (`properties.dtype`) of every tensor."""
        return self._tensors

    def check(self, all_runs: Iterable[TensorRuns], names: Iterable[str] = ()) -> None:
        """Read all that `read` of these, and `tensor` of these names, will read,
        and compare it with its digests.

        Errors: CheckpointError that names the file if it cannot be read or is damaged
        """
        wanted: dict[str, dict[int, None]] = {}
        whole = (self._whole_run(name) for name in names)
        for run in (*(run for tensor_runs in all_runs for run in tensor_runs.runs), *whole):
            for item in self._read_items(run, list(_boxes_of(run))):
                info: _StorageInfo = self._metadata.storage_data[item.storage_index]
                wanted.setdefault(info.relative_path, {})[info.offset] = None
        for name, offsets in wanted.items():
            spans = [self._spans[name, offset] for offset in sorted(offsets)]
            with self._told(name), self._store.open(f"{self._folder}/{name}") as file:
                for _ in self._reader.read(file, spans, where=f"{self.where}/{name}"):
                    pass

    @torch.no_grad()
    def read(self, all_runs: Iterable[TensorRuns]) -> None:
        """Fill the runs of these; of a tensor of another dtype, with rounded values.

        Errors: CheckpointError that names the file if it cannot be read or is damaged;
                some may be filled then
        """
        for tensor_runs in all_runs:
            if tensor_runs.runs:
                with tensor_runs.here(True):
                    self._read_runs(tensor_runs.runs, tensor_runs.flats())

    def tensor(self, name: str) -> Tensor:
        """Return one whole tensor, in host memory."""
        metadata = self._tensors[name]
        whole = torch.empty(metadata.size, dtype=metadata.properties.dtype, device="cpu")
        self._read_runs([self._whole_run(name)], {name: whole.view(-1)})
        return whole

    def _whole_run(self, name: str) -> TensorRun:
        shape = tuple(self._tensors[name].size)
        return TensorRun(name=name, shape=shape, start=0, numel=prod(shape), flat=name, offset=0)

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state_dict, whole and in host memory."""
        saved = self.training()
        state: dict[str, Any] = {
            name[len(MODEL) :]: self.tensor(name) for name in self.tensors() if name.startswith(MODEL)
        }
        state |= {name: state[first] for name, first in saved["aliases"].items() if first in state}
        state |= saved["extra_state"]
        return state

    def _read_runs(self, runs: Sequence[TensorRun], flats: Mapping[str, Tensor]) -> None:
        wanted: dict[str, list[tuple[_StorageInfo, ReadItem, Tensor]]] = {}
        for run in runs:
            for item, place in self._items(run, flats[run.flat]):
                info: _StorageInfo = self._metadata.storage_data[item.storage_index]
                wanted.setdefault(info.relative_path, []).append((info, item, place))
        for name, items in wanted.items():
            items.sort(key=lambda one: one[0].offset)
            spans = [self._spans[name, offset] for offset in {info.offset: None for info, _, _ in items}]
            with self._told(name), self._store.open(f"{self._folder}/{name}") as file:
                archives = self._reader.read(file, spans, where=f"{self.where}/{name}")
                for _, of_box in groupby(items, key=lambda one: one[0].offset):
                    archive, box = next(archives), None
                    for _, item, place in of_box:
                        box = self._box(archive, item) if box is None else box
                        place.copy_(_part(box, item))

    def _items(self, run: TensorRun, flat: Tensor) -> Iterable[tuple[ReadItem, Tensor]]:
        """Yield the items to read for a run, each with the tensor that it goes to."""
        boxes = list(_boxes_of(run))
        places = {box.offsets: box.of(flat) for box in boxes}
        for item in self._read_items(run, boxes):
            place = places[tuple(item.dest_index.offset or ())]
            for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                place = place.narrow(dim, offset, length)
            yield item, place

    def _read_items(self, run: TensorRun, boxes: Sequence[PlacedBox]) -> list[ReadItem]:
        chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
        return create_read_items_for_chunk_list(run.name, self._tensors[run.name], chunks)

    def _box(self, archive: memoryview, item: ReadItem) -> Tensor:
        metadata, index = self._tensors[item.storage_index.fqn], item.storage_index
        sizes = next(chunk.sizes for chunk in metadata.chunks if chunk.offsets == index.offset)
        return tensor_in(archive, dtype=metadata.properties.dtype, shape=sizes)

    def verify(self, tell: Callable[[int], object] = lambda num_bytes: None) -> None:
        """Read everything, and compare it with its digests; `tell` is called with the bytes that are done.

        Errors: CheckpointError that names the first file and bytes that differ
        """
        for name, spans in self.manifest.files.items():
            with self._told(name), self._store.open(f"{self._folder}/{name}") as file:
                for data in self._reader.read(file, spans, where=f"{self.where}/{name}"):
                    tell(len(data))

    def _told(self, name: str) -> _Told:
        return _Told(f"{self.where}/{name}")


class _Told:
    """Turns an error of the file system into one line that names the file."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise CheckpointError(f"{self._where} cannot be read: {error}") from error


def _boxes_of(run: TensorRun) -> Iterator[PlacedBox]:
    return run.boxes(max_numel=max(1, run.numel))


def _part(box: Tensor, item: ReadItem) -> Tensor:
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        box = box.narrow(dim, offset, length)
    return box
