"""Writing through torch.distributed.checkpoint: every rank its own file, in the format of torch's FileSystemReader.

A rank's file holds one `torch.save` after another, one for each box of a tensor, and `.metadata` says which is where. So whatever
reads such folders reads these: FSDP2, torchtitan, `dcp_to_torch_save`.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import IO, Any, NamedTuple, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .boxes import Box, boxes_of
from .manifest import Span
from .shelf import Run, Shelf
from .store import Store
from .stream import Stream

METADATA = ".metadata"
_BOX_BYTES = 32 << 20  # who needs any of a box reads all of it
_CRC32 = threading.Lock()  # torch's choice of checksums is one for all threads
_AROUND_BOX = 4096  # more than torch.save puts around a tensor, with its name at its longest


class _Place(NamedTuple):
    """Where a box's elements are: which shelf, which of its runs."""

    shelf: int
    run: Run
    box: Box


class ShelfPlanner(DefaultSavePlanner):
    """Plans the boxes of shelves; no state_dict."""

    def __init__(self, shelves: Sequence[Shelf]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shelves = tuple(shelves)
        self._places: dict[tuple[str, tuple[int, ...]], _Place] = {}
        self._order: dict[tuple[str, tuple[int, ...]], int] = {}

    def set_up_planner(
        self,
        state_dict: Mapping[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing: the shelves are known."""

    def create_local_plan(self) -> SavePlan:
        """Return all boxes of this rank, shelf by shelf."""
        items: list[WriteItem] = []
        for number, shelf in enumerate(self._shelves):
            for run in shelf.runs:
                dtype = shelf.dtypes[run.flat]
                for box in boxes_of(
                    run.shape, run.start, run.start + run.numel, max_numel=_BOX_BYTES // dtype.itemsize
                ):
                    key = (run.name, box.offsets)
                    self._places[key] = _Place(number, run, box)
                    self._order[key] = len(items)
                    items.append(_write_item(run, box, dtype))
        return SavePlan(items)

    def in_order(self, items: Sequence[WriteItem]) -> Iterator[tuple[WriteItem, Tensor]]:
        """Give them shelf by shelf with their values, in host memory; each shelf is here once."""
        keyed = [((item.index.fqn, tuple(item.index.offset or ())), item) for item in items]
        keyed.sort(key=lambda pair: self._order[pair[0]])
        with ExitStack() as stack:
            open_shelf = -1
            flats: Mapping[str, Tensor] = {}
            for key, item in keyed:
                place = self._places[key]
                if place.shelf != open_shelf:
                    stack.close()
                    open_shelf, shelf = place.shelf, self._shelves[place.shelf]
                    stack.enter_context(shelf.here(False))
                    flats = shelf.flats()
                yield item, _values(flats[place.run.flat], place)


def _values(flat: Tensor, place: _Place) -> Tensor:
    """Return a box's elements in host memory, as a tensor without others behind it: torch.save writes all of a storage."""
    first = place.run.offset + place.box.start - place.run.start
    values = flat[first : first + place.box.numel].detach().cpu()
    alone = (
        torch.from_numpy(values.view(torch.uint8).numpy()).view(values.dtype)
        if values.numel()
        else values.clone()
    )
    return alone.view(place.box.sizes)


def _num_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    if data is None:
        raise AssertionError(f"{item.index.fqn} is no tensor")
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _write_item(run: Run, box: Box, dtype: torch.dtype) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(run.name, torch.Size(box.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(run.shape),
        ),
    )


@dataclass
class _Stored(_StorageInfo):
    """Where a box is, with its digest. Only on its way to the coordinator."""

    digest: str = ""

    def without_digest(self) -> _StorageInfo:
        return _StorageInfo(self.relative_path, self.offset, self.length)


class ShelfWriter(StorageWriter):
    """Writes this rank's boxes into one file of `folder`; on the coordinator, `files` are then those of all ranks."""

    def __init__(self, store: Store, folder: str, *, rank: int) -> None:
        self._store, self._folder = store, folder
        self._name = f"__{rank}_0.distcp"
        self.files: dict[str, tuple[Span, ...]] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is one writer for each checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def storage_meta(self) -> StorageMeta | None:
        """Nothing that a reader needs."""
        return None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any."""
        return True

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the boxes, and have them on the disk."""
        if not isinstance(planner, ShelfPlanner):
            raise AssertionError(f"{type(planner).__name__} plans no shelves")
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan.items, planner) if plan.items else [])
        return done

    def _write(self, items: Sequence[WriteItem], planner: ShelfPlanner) -> list[WriteResult]:
        capacity = sum(_num_bytes(item) + _AROUND_BOX for item in items)
        results = []
        with self._store.stream(f"{self._folder}/{self._name}", capacity=capacity) as stream:
            for item, values in planner.in_order(items):
                sink = _Sink(stream)
                _save_box(values, sink)
                stored = _Stored(self._name, sink.begin, sink.num_bytes, digest=sink.digest())
                results.append(
                    WriteResult(index=item.index, size_in_bytes=sink.num_bytes, storage_data=stored)
                )
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`, on the coordinator."""
        places: dict[MetadataIndex, _StorageInfo] = {}
        spans: dict[str, list[Span]] = {}
        for result in (result for rank in results for result in rank):
            stored: _Stored = result.storage_data
            places[result.index] = stored.without_digest()
            spans.setdefault(stored.relative_path, []).append(
                Span(stored.offset, stored.length, stored.digest)
            )
        self.files = {name: tuple(sorted(parts)) for name, parts in spans.items()}
        data = pickle.dumps(replace(metadata, storage_data=places))
        self._store.put(f"{self._folder}/{METADATA}", data)
        self.files[METADATA] = (Span(0, len(data), xxhash.xxh3_64_hexdigest(data)),)


def _save_box(values: Tensor, sink: _Sink) -> None:
    """torch.save, without the CRC-32 in its archive: that takes longer than the disk, and the manifest has a digest."""
    with _CRC32:
        was = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(values, cast("IO[bytes]", sink))
        finally:
            torch.serialization.set_crc32_options(was)


class _Sink(io.RawIOBase):
    """What torch.save writes one box to."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._hash = stream, xxhash.xxh3_64()
        self.begin = stream.tell()

    @property
    def num_bytes(self) -> int:
        return self._stream.tell() - self.begin

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return self._stream.write(data)

    def digest(self) -> str:
        return self._hash.hexdigest()

    def writable(self) -> bool:
        return True
