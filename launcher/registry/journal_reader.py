"""Reads the journal of a job, from its beginning or from its end, also while it is written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from .journal import FILE, KINDS, OLD_FILE, Entry

_READ_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16
_MAX_TAIL_BYTES = 4 << 20


class JournalReader:
    """Goes through the lines of both files, and then through later ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd: int | None = None
        self._segment = -1
        self._rest = b""

    def entries(self) -> Iterator[Entry]:
        """Yield the present lines that were not read yet. A file that was replaced before it was read is
        passed over; the next one's first line says how many lines are gone.
        """
        while self._fd is not None or self._open_next():
            yield from self._read_file()
            if not self._is_replaced():
                return
            yield from self._read_file()  # lines that came between the two looks
            self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._rest = None, b""

    def _read_file(self) -> Iterator[Entry]:
        if self._fd is None:
            return
        while data := os.read(self._fd, _READ_BYTES):
            *lines, self._rest = (self._rest + data).split(b"\n")
            for one in lines:
                entry = _entry(one)
                if entry is not None:
                    yield entry

    def _is_replaced(self) -> bool:
        """Tell whether the file that is read is not the last one."""
        try:
            last = os.stat(self._folder / FILE)
        except OSError:
            return False
        own = os.fstat(self._fd if self._fd is not None else -1)
        return (last.st_dev, last.st_ino) != (own.st_dev, own.st_ino)

    def _open_next(self) -> bool:
        """Open the oldest file that was not read."""
        found: list[tuple[int, int]] = []  # segments and descriptors
        for name in (FILE, OLD_FILE):  # in this order, for the first becomes the second
            try:
                fd = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                continue
            head = _entry(os.pread(fd, 4096, 0).partition(b"\n")[0])
            segment = head[1] if head and head[0] == "h" and isinstance(head[1], int) else -1
            found.append((segment, fd))
        wanted = min((one for one in found if one[0] > self._segment), default=None)
        for one in found:
            if one is not wanted:
                os.close(one[1])
        if wanted is None:
            return False
        self._segment, self._fd = wanted
        return True


def last_line(folder: Path) -> str:
    """Return the last shown line."""
    size = _TAIL_BYTES
    while size <= _MAX_TAIL_BYTES:
        is_whole, data = _tail(folder / FILE, size)
        for one in reversed(data.split(b"\n")):
            text = _text(_entry(one))
            if text:
                return text
        if is_whole:
            break
        size *= 8
    return ""


def _tail(path: Path, size: int) -> tuple[bool, bytes]:
    """Return the last bytes of a file, and whether they are all of it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True, b""
    try:
        start = os.fstat(fd).st_size - size
        return start <= 0, os.pread(fd, size, max(0, start))
    finally:
        os.close(fd)


def _text(entry: Entry | None) -> str:
    """Return the last line of an entry that shows text."""
    if entry is None or entry[0] not in ("o", "w", "r"):
        return ""
    lines = [one for one in str(entry[-1]).splitlines() if one.strip()]
    return lines[-1] if lines else ""


def _entry(data: bytes) -> Entry | None:
    """Read an entry; None for a line in another form: half of one that a crash has left."""
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, list) and found and len(found) >= _LENGTHS.get(found[0], 99) else None


_LENGTHS = {"h": 5, "l": 3, **{letter: 1 + len(kind._fields) for letter, kind in KINDS.items()}}
