"""Files that are written front to back, past the page cache where the file system can, while their
contents are made.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, cast

import numpy as np

from ....kernels.disk import DiskEngine, DiskFile, DiskRequest, aligned_empty

_BUFFER_BYTES = 8 << 20  # keeps the disk busy, and is allocated quickly for each file
_NUM_BUFFERS = 3  # one buffer is filled, while two are on their way
_PAGE = 4096
_MODE = 0o666  # the umask narrows it


class ByteStream(Protocol):
    """Receiver of bytes, front to back."""

    def write(self, data: bytes | memoryview) -> int:
        """Take all of `data`."""

    def tell(self) -> int:
        """Return how many bytes the stream has taken."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors of the file system inside name the file: those of an open file do not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


class DirectStream:
    """A new file. At the end of the `with` block it is on the disk, or gone if the block failed.

    Errors: OSError with the bytes wanted and free if the disk has no `capacity` bytes left, when it is made
    """

    def __init__(self, path: Path, *, capacity: int) -> None:
        self._path = path
        self._engine = DiskEngine(is_quiet=True)
        try:
            self._file: DiskFile = self._engine.create(path, -(-capacity // _PAGE) * _PAGE)
        except BaseException:
            self._engine.close()
            raise
        self._free = [
            memoryview(cast("bytearray", aligned_empty(_BUFFER_BYTES))) for _ in range(_NUM_BUFFERS)
        ]
        self._under_way: deque[tuple[DiskRequest, memoryview]] = deque()
        self._buffer, self._filled = self._free.pop(), 0
        self._written = 0  # bytes given to the engine; whole buffers, so a multiple of a page

    def write(self, data: bytes | memoryview) -> int:
        """Take all of `data`."""
        source = np.frombuffer(data, dtype=np.uint8)
        done = 0
        while done < len(source):
            count = min(len(source) - done, _BUFFER_BYTES - self._filled)
            # numpy's copy lets other threads run Python meanwhile, memoryview's does not
            place = np.frombuffer(self._buffer, dtype=np.uint8, count=count, offset=self._filled)
            np.copyto(place, source[done : done + count])
            done += count
            self._filled += count
            if self._filled == _BUFFER_BYTES:
                self._send()
        return done

    def tell(self) -> int:
        """Return how many bytes the stream has taken."""
        return self._written + self._filled

    def flush(self) -> None:
        """Bytes are on their way when a buffer is full."""

    def _send(self) -> None:
        size = -(-self._filled // _PAGE) * _PAGE  # the padding behind the end is cut off later
        self._under_way.append((self._file.write(self._buffer[:size], self._written), self._buffer))
        self._written += self._filled
        if not self._free:
            request, buffer = self._under_way.popleft()
            request.wait()
            self._free.append(buffer)
        self._buffer, self._filled = self._free.pop(), 0

    def __enter__(self) -> DirectStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._filled:
                self._send()
            while self._under_way:
                self._under_way.popleft()[0].wait()
        except OSError:
            self._engine.close()
            self._path.unlink(missing_ok=True)
            raise
        self._engine.close()
        if error is not None:
            self._path.unlink(missing_ok=True)
            return
        with naming(self._path):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.ftruncate(descriptor, self._written)
                os.fchmod(descriptor, _MODE & ~_umask())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _umask() -> int:
    """The mask of this process, which can only be read from the kernel without changing it for a moment."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022
