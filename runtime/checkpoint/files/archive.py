"""The archives that torch.save wrote, one after another in a file: read ahead, checked,
and looked into where they lie.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO

import torch
from torch import Tensor

from .manifest import FileSpan, check_bytes

# A zip archive; every member has such a header in front of its bytes, which are not compressed.
_HEADER = struct.Struct(
    "<4s HH H 16x HH"
)  # signature, versions and flags, method, lengths of name and extra field
_SIGNATURE = b"PK\x03\x04"
_STORAGE = b"archive/data/0"  # the member with the tensor's bytes
_BEFORE_STORAGE = 4096  # more than comes before it


class SpanReader:
    """Two buffers that are used again: to get new memory from the system takes longer than to read."""

    def __init__(self) -> None:
        self._buffers = [bytearray(), bytearray()]

    def read(self, file: IO[bytes], spans: Sequence[FileSpan], *, where: str) -> Iterator[memoryview]:
        """Give the bytes of each span, until the next is asked for, which is read and checked meanwhile.

        Errors: CheckpointError if they are not what was written; OSError
        """
        if not spans:
            return
        longest = max(span.num_bytes for span in spans)
        for index, buffer in enumerate(self._buffers):
            if len(buffer) < longest:
                self._buffers[index] = bytearray(longest)
        views = [memoryview(buffer) for buffer in self._buffers]

        def read(number: int) -> memoryview:
            span, view = spans[number], views[number % len(views)]
            file.seek(span.offset)
            data = view[: _read_into(file, view[: span.num_bytes])]
            check_bytes(data, span, where=where)
            return data

        with ThreadPoolExecutor(1, "dslaunch-read") as thread:
            coming = thread.submit(read, 0)
            for number in range(len(spans)):
                data = coming.result()
                if number + 1 < len(spans):
                    coming = thread.submit(read, number + 1)
                yield data


def _read_into(file: IO[bytes], buffer: memoryview) -> int:
    """Fill the buffer, or a part of it at the end of the file."""
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])  # type: ignore[attr-defined]
        if not count:
            break
        done += count
    return done


def tensor_in(archive: memoryview, *, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return the contiguous tensor that torch.save wrote, in the archive's own memory where that can be."""
    numel = torch.Size(shape).numel()
    if numel == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    start = _start_of_storage(archive)
    if start is None or len(archive) < start + numel * dtype.itemsize:
        whole: Tensor = torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)
        return whole
    return torch.frombuffer(archive, dtype=dtype, count=numel, offset=start).view(tuple(shape))


def _start_of_storage(archive: memoryview) -> int | None:
    name = bytes(archive[:_BEFORE_STORAGE]).find(_STORAGE)
    header = name - _HEADER.size
    if header < 0:
        return None
    signature, _, _, method, name_bytes, extra_bytes = _HEADER.unpack_from(archive, header)
    if signature != _SIGNATURE or method != 0 or name_bytes != len(_STORAGE):
        return None
    return int(name + name_bytes + extra_bytes)
