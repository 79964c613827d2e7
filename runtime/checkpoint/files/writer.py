"""One rank's file, and the records that torch.distributed.checkpoint needs of all files.

A file holds one `torch.save` after another, one for each box of a tensor, and `.metadata` says which is
where: the format of torch's FileSystemWriter. So whatever reads such folders reads these: FSDP2, torchtitan,
`dcp_to_torch_save`.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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

from ...offload.device_copies import Arrival
from ...offload.pinned_memory import host_empty
from ..storage.store import Store
from ..storage.stream import ByteStream
from .manifest import FileSpan
from .tensor_runs import PlacedBox, TensorRun, TensorRuns

METADATA = ".metadata"
BOX_BYTES = 32 << 20  # a reader of any part of a box reads all of it
_NUM_BUFFERS = 2  # buffers for boxes from a GPU: one is written to the file while a copy fills the other
_CRC32 = threading.Lock()  # torch's choice of checksums is one for all threads
AROUND_BOX = 4096  # more than torch.save puts around a tensor, with its name at its longest


class Written(NamedTuple):
    """One box and its place."""

    name: str  # name of the tensor
    shape: tuple[int, ...]
    dtype: str  # torch's name: "bfloat16"
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    span: FileSpan


def write_runs(
    store: Store, folder: str, all_runs: Sequence[TensorRuns], *, rank: int, part: int = 0
) -> list[Written]:
    """Write this rank's boxes, one `TensorRuns` after another, to a file of its own, durably. Who writes them
    in parts has a file for each.

    Errors: OSError with the bytes wanted and free if there is no room for it, before anything is written
    """
    capacity = sum(num_bytes + AROUND_BOX for num_bytes in box_bytes(all_runs))
    if capacity == 0:
        return []
    file = f"__{rank}_{part}.distcp"
    written = []
    with store.stream(f"{folder}/{file}", capacity=capacity) as stream:
        for tensor_runs in all_runs:
            if not tensor_runs.runs:
                continue
            with tensor_runs.here(False):
                flats = tensor_runs.flats()
                for run, box, values in boxes_on_host(tensor_runs, flats):
                    sink = _Sink(stream)
                    _save_box(values, sink)
                    dtype = str(tensor_runs.dtypes[run.flat]).removeprefix("torch.")
                    written.append(
                        Written(run.name, run.shape, dtype, box.offsets, box.sizes, file, sink.span())
                    )
    return written


def make_metadata(written: Sequence[Written]) -> bytes:
    """Return the content of `.metadata`, for the boxes of all ranks.

    Errors: AssertionError unless they make up whole tensors
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for box in written:
        metadata = tensors.setdefault(
            box.name,
            TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, box.dtype)), torch.Size(box.shape), []
            ),
        )
        offsets = torch.Size(box.offsets)
        places[MetadataIndex(box.name, offsets)] = _StorageInfo(box.file, box.span.offset, box.span.num_bytes)
        metadata.chunks.append(ChunkStorageMetadata(offsets, torch.Size(box.sizes)))
    for name, metadata in tensors.items():
        if sum(prod(chunk.sizes) for chunk in metadata.chunks) != prod(metadata.size):
            raise AssertionError(f"the ranks' boxes of {name} are not the whole tensor")
    return pickle.dumps(Metadata(dict(tensors), storage_data=places))


def spans_of(written: Sequence[Written]) -> dict[str, tuple[FileSpan, ...]]:
    """Return the spans of all ranks' files, from their beginnings to their ends."""
    spans: dict[str, list[FileSpan]] = {}
    for box in written:
        spans.setdefault(box.file, []).append(box.span)
    return {file: tuple(sorted(parts)) for file, parts in spans.items()}


def _boxes(tensor_runs: TensorRuns) -> Iterator[tuple[TensorRun, PlacedBox]]:
    for run in tensor_runs.runs:
        max_numel = BOX_BYTES // tensor_runs.dtypes[run.flat].itemsize
        for box in run.boxes(max_numel=max_numel):
            yield run, box


def box_bytes(all_runs: Sequence[TensorRuns]) -> Iterator[int]:
    """Yield the bytes of each box, in the order of the file."""
    for tensor_runs in all_runs:
        for run, box in _boxes(tensor_runs):
            yield box.numel * tensor_runs.dtypes[run.flat].itemsize


class _Coming(NamedTuple):
    """A box whose values are here, or on their way."""

    run: TensorRun
    box: PlacedBox
    values: Tensor  # [box.numel] in host memory
    arrival: Arrival | None


def boxes_on_host(
    tensor_runs: TensorRuns, flats: Mapping[str, Tensor]
) -> Iterator[tuple[TensorRun, PlacedBox, Tensor]]:
    """Yield each box with its elements in host memory, which is reused when the next one is asked for.

    Boxes on a GPU come through two page-locked buffers: while the caller has one, the next box is on its
    way into the other.
    """
    buffers = _Buffers(tensor_runs, flats)
    coming: deque[_Coming] = deque()
    for run, box in _boxes(tensor_runs):
        values, arrival = box.of(flats[run.flat].detach()).reshape(-1), None
        if values.is_cuda and values.numel():
            target = buffers.take(values)
            values, arrival = target, Arrival(values, target)
        coming.append(_Coming(run, box, values, arrival))
        if len(coming) == _NUM_BUFFERS:
            yield _arrived(coming.popleft())
    while coming:
        yield _arrived(coming.popleft())


class _Buffers:
    """Page-locked memory for boxes that come from a GPU, used in turn."""

    def __init__(self, tensor_runs: TensorRuns, flats: Mapping[str, Tensor]) -> None:
        self._num_bytes = max(
            (
                box.numel * flats[run.flat].itemsize
                for run, box in _boxes(tensor_runs)
                if flats[run.flat].is_cuda
            ),
            default=0,
        )
        self._buffers: deque[Tensor] = deque()

    def take(self, like: Tensor) -> Tensor:
        """Return [n] of that dtype, in the buffer that was taken longest ago."""
        if len(self._buffers) < _NUM_BUFFERS:
            buffer = host_empty((self._num_bytes,), torch.uint8, pin_memory=True)
        else:
            buffer = self._buffers.popleft()
        self._buffers.append(buffer)
        return buffer[: like.nbytes].view(like.dtype)


def _arrived(coming: _Coming) -> tuple[TensorRun, PlacedBox, Tensor]:
    """Return the box as a tensor with a storage of its own: torch.save writes all of a storage."""
    if coming.arrival is not None:
        coming.arrival.wait()
    values = coming.values.cpu()
    if not values.numel():
        return coming.run, coming.box, values.clone().view(coming.box.sizes)
    alone = torch.from_numpy(values.view(torch.uint8).numpy()).view(values.dtype)
    return coming.run, coming.box, alone.view(coming.box.sizes)


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
    """File object that torch.save writes one box to."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream, self._hash = stream, xxhash.xxh3_64()
        self._begin = stream.tell()

    def span(self) -> FileSpan:
        return FileSpan(self._begin, self._stream.tell() - self._begin, self._hash.hexdigest())

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return self._stream.write(data)

    def writable(self) -> bool:
        return True
