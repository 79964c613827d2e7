"""One rank's file, and what torch.distributed.checkpoint has to know of all of them.

A file holds one `torch.save` after another, one for each box of a tensor, and `.metadata` says which is
where: the format of torch's FileSystemWriter. So whatever reads such folders reads these: FSDP2, torchtitan,
`dcp_to_torch_save`.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Iterator, Sequence
from math import prod
from typing import IO, Any, NamedTuple, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..storage.store import Store
from ..storage.stream import Stream
from .boxes import Box, boxes_of
from .manifest import Span
from .shelf import Run, Shelf

METADATA = ".metadata"
_BOX_BYTES = 32 << 20  # who needs any of a box reads all of it
_CRC32 = threading.Lock()  # torch's choice of checksums is one for all threads
_AROUND_BOX = 4096  # more than torch.save puts around a tensor, with its name at its longest


class Written(NamedTuple):
    """One box, where it is."""

    name: str  # of the tensor
    shape: tuple[int, ...]
    dtype: str  # as torch calls it: "bfloat16"
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    span: Span


def write_shelves(store: Store, folder: str, shelves: Sequence[Shelf], *, rank: int) -> list[Written]:
    """Write this rank's boxes into a file of its own, shelf by shelf, and have it on the disk.

    Errors: OSError with the bytes wanted and free if there is no room for it, before anything is written
    """
    capacity = sum(num_bytes + _AROUND_BOX for num_bytes in _box_bytes(shelves))
    if capacity == 0:
        return []
    file = f"__{rank}_0.distcp"
    written = []
    with store.stream(f"{folder}/{file}", capacity=capacity) as stream:
        for shelf in shelves:
            if not shelf.runs:
                continue
            with shelf.here(False):
                flats = shelf.flats()
                for run, box in _boxes(shelf):
                    sink = _Sink(stream)
                    _save_box(_values(flats[run.flat], run, box), sink)
                    dtype = str(shelf.dtypes[run.flat]).removeprefix("torch.")
                    written.append(
                        Written(run.name, run.shape, dtype, box.offsets, box.sizes, file, sink.span())
                    )
    return written


def make_metadata(written: Sequence[Written]) -> bytes:
    """Return what is in `.metadata`, of the boxes of all ranks.

    Errors: AssertionError unless they make up whole tensors
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for box in written:
        found = tensors.setdefault(
            box.name,
            TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, box.dtype)), torch.Size(box.shape), []
            ),
        )
        offsets = torch.Size(box.offsets)
        places[MetadataIndex(box.name, offsets)] = _StorageInfo(box.file, box.span.offset, box.span.num_bytes)
        found.chunks.append(ChunkStorageMetadata(offsets, torch.Size(box.sizes)))
    for name, found in tensors.items():
        if sum(prod(chunk.sizes) for chunk in found.chunks) != prod(found.size):
            raise AssertionError(f"the ranks' boxes of {name} are not the whole tensor")
    return pickle.dumps(Metadata(dict(tensors), storage_data=places))


def spans_of(written: Sequence[Written]) -> dict[str, tuple[Span, ...]]:
    """Return the spans of all ranks' files, from their beginnings to their ends."""
    spans: dict[str, list[Span]] = {}
    for box in written:
        spans.setdefault(box.file, []).append(box.span)
    return {file: tuple(sorted(parts)) for file, parts in spans.items()}


def _boxes(shelf: Shelf) -> Iterator[tuple[Run, Box]]:
    for run in shelf.runs:
        max_numel = _BOX_BYTES // shelf.dtypes[run.flat].itemsize
        for box in boxes_of(run.shape, run.start, run.start + run.numel, max_numel=max_numel):
            yield run, box


def _box_bytes(shelves: Sequence[Shelf]) -> Iterator[int]:
    for shelf in shelves:
        for run, box in _boxes(shelf):
            yield box.numel * shelf.dtypes[run.flat].itemsize


def _values(flat: Tensor, run: Run, box: Box) -> Tensor:
    """Return a box's elements in host memory, as a tensor without others behind it:
    torch.save writes all of a storage.
    """
    first = run.offset + box.start - run.start
    values = flat[first : first + box.numel].detach().cpu()
    if not values.numel():
        return values.clone().view(box.sizes)
    return torch.from_numpy(values.view(torch.uint8).numpy()).view(values.dtype).view(box.sizes)


def _save_box(values: Tensor, sink: _Sink) -> None:
    """torch.save, without the CRC-32 in its archive: that takes longer than the disk,
    and the manifest has a digest.
    """
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
        self._begin = stream.tell()

    def span(self) -> Span:
        return Span(self._begin, self._stream.tell() - self._begin, self._hash.hexdigest())

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return self._stream.write(data)

    def writable(self) -> bool:
        return True
