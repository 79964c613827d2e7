"""Contents on their way into a folder: written under names of their own until all are there.

So a host that is killed, or whose disk is full, has every file as it was.
"""

from __future__ import annotations

import os
import threading
import time

from ...wire.manifest import Entry, new_digest
from ..system.lean_stdlib import suppress
from .sync_folder import READ_BYTES, Folder, write_all
from .sync_record import coming

_PART = b".part"


class SyncContents:
    """Contents are written by one thread; others may already read the part that is there."""

    def __init__(self, folder: Folder, sizes: dict[bytes, int]) -> None:
        self._folder = folder
        self._root = folder.root
        self._sizes = sizes
        self._changed = threading.Condition()
        self._ready: dict[bytes, bytes] = {}  # path of each complete content, by digest
        self._current = b""
        self._num_bytes = 0  # bytes of the current one so far
        self._fd = -1
        self._digest = new_digest()
        self._is_over = False

    def add(self, digest: bytes, path: bytes) -> None:
        """Note that a content is there, under this name."""
        with self._changed:
            self._ready[digest] = path
            self._changed.notify_all()

    def begin(self, entry: Entry) -> None:
        """Begin to write a content. Errors: OSError"""
        path = coming(entry.digest) + _PART
        self._folder.remove(path)
        self._fd = self._folder.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._digest = new_digest()
        with self._changed:
            self._current, self._num_bytes = entry.digest, 0
            self._changed.notify_all()

    def write(self, data: bytes | memoryview) -> None:
        """Write on; zeros become a hole. Errors: OSError"""
        self._folder.beat()
        self._digest.update(data)
        if data[0] == 0 and bytes(data).count(0) == len(data):
            os.lseek(self._fd, len(data), os.SEEK_CUR)
            os.ftruncate(self._fd, self._num_bytes + len(data))
        else:
            write_all(self._fd, data)
        with self._changed:
            self._num_bytes += len(data)
            self._changed.notify_all()

    def end(self) -> bool:
        """Tell whether the content is the right one; if not, it is removed. Errors: OSError"""
        self.give_up_current()
        path, digest = coming(self._current), self._current
        is_right = self._digest.digest() == digest
        if is_right:
            name, parent = self._folder.at(path)
            os.rename(name + _PART, name, src_dir_fd=parent, dst_dir_fd=parent)
            self.add(digest, path)
        else:
            self._folder.remove(path + _PART)
        with self._changed:
            self._current = b""
        return is_right

    def give_up_current(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                os.close(self._fd)
            self._fd = -1

    def copy(self, entry: Entry, path: bytes) -> bool:
        """Copy a file that is there; False if it has another content by now. Errors: OSError"""
        try:
            source = self._folder.open(path)
        except OSError:
            return False
        try:
            self.begin(entry)
            while True:
                data = os.read(source, READ_BYTES)
                if not data:
                    return self.end()
                self.write(data)
        finally:
            os.close(source)
            self.give_up_current()

    # For peers; called by their threads.

    def close(self) -> None:
        """Wake the waiting peers: nothing more will come."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def open(self, digest: bytes, wait_s: float) -> int | None:
        """Return a file to read it from, once a part of it is there; None if the list has no such content."""
        until = time.monotonic() + wait_s
        while digest in self._sizes and not self._is_over:
            with self._changed:
                path = self._ready.get(digest) or (
                    coming(digest) + _PART if digest == self._current else None
                )
                if path is None:
                    self._changed.wait(max(0.0, until - time.monotonic()))
            if path is not None:
                with suppress(OSError):  # it is just being moved to its place
                    return os.open(os.path.join(self._root, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                time.sleep(0.01)
            if time.monotonic() > until:
                break
        return None

    @property
    def num_known(self) -> int:
        """Number of contents that are in the list."""
        return len(self._sizes)

    def size(self, digest: bytes) -> int:
        return self._sizes[digest]

    def wait_beyond(self, digest: bytes, num_bytes: int, wait_s: float) -> int:
        """Return how many bytes of it are there, as soon as there are more; the same number if none come."""

        def there() -> int:
            if digest in self._ready:
                return self._sizes[digest]
            return self._num_bytes if digest == self._current else num_bytes

        with self._changed:
            self._changed.wait_for(lambda: self._is_over or there() > num_bytes, timeout=wait_s)
            return there()
