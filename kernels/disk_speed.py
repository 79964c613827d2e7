"""Speed of a disk engine, writing and reading a file as an optimizer step does: large arrays,
several on their way.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import cast

from .disk import DiskFile, DiskRequest, aligned_empty

PIECE_BYTES = 64 << 20  # size of one request
NUM_PIECES = 2  # buffers: one is on its way while the other is waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpeed:
    """Bytes per second. `first_write` fills fresh space, `write` replaces what is there, as training does."""

    first_write: float
    write: float
    read: float


def measure(file: DiskFile) -> DiskSpeed:
    """Write the whole file twice and read it once.

    Errors:  OSError if the disk fails; MemoryError; ValueError if the file is empty,
             or the bytes read differ from those written
    """
    if file.nbytes == 0:
        raise ValueError(f"{file.path}: an empty file has no speed")
    pieces = [cast("memoryview", memoryview(_piece(file.nbytes))) for _ in range(NUM_PIECES)]
    for index, piece in enumerate(pieces):
        piece[:] = bytes([65 + index]) * len(piece)
    first = _pass(file, pieces, is_write=True)
    again = _pass(file, pieces, is_write=True)
    for piece in pieces:
        piece[:] = bytes(len(piece))
    read = _pass(file, pieces, is_write=False)
    last = (file.nbytes - 1) // PIECE_BYTES % NUM_PIECES
    if pieces[last][0] != 65 + last:
        raise ValueError(f"{file.path}: what was read is not what was written")
    return DiskSpeed(first_write=first, write=again, read=read)


def _piece(nbytes: int) -> memoryview:
    return cast("memoryview", aligned_empty(min(nbytes, PIECE_BYTES)))


def _pass(file: DiskFile, pieces: list[memoryview], *, is_write: bool) -> float:
    began = time.perf_counter()
    requests: list[DiskRequest] = []
    for index, offset in enumerate(range(0, file.nbytes, PIECE_BYTES)):
        piece = pieces[index % NUM_PIECES][: file.nbytes - offset]
        if index >= NUM_PIECES:
            requests[index - NUM_PIECES].wait()  # its buffer is used again
        requests.append(file.write(piece, offset) if is_write else file.read(piece, offset))
    for request in requests[-NUM_PIECES:]:
        request.wait()
    return file.nbytes / (time.perf_counter() - began)
