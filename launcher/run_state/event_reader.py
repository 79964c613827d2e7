"""Reads the events of a job from their files, also while these are written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_READ_BYTES = 1 << 20
MAX_LINE_BYTES = 32 << 20  # a longer line is no event


class EventReader:
    """Goes through `PATH.old`, if there is one, and `PATH`, then through later events.

    When `PATH` is replaced by the next file, reading goes on there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fds: list[int] = []  # the file that is read now, and the one after it
        self._lines: deque[bytes] = deque()
        self._rest = b""
        self._is_begun = False
        self.num_events = self.num_bad = 0  # lines that are no events are bad
        self.problem = ""  # why the file could not be opened

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events that are there and were not read yet; a caller that ends early gets the others
        later.
        """
        while self._lines or self._fill():
            while self._lines:
                line = self._lines.popleft()
                event = event_of(line)
                if event is not None:
                    self.num_events += 1
                    yield event
                elif line.strip():
                    self.num_bad += 1

    @property
    def rest(self) -> bytes:
        """Return a line that has no end: it is being written, or the file was cut."""
        return self._rest

    def _fill(self) -> bool:
        """Read more lines, from the next file if this one is read to its end; False if there are none now."""
        self._open()
        while self._fds:
            if self._read():
                return True
            if len(self._fds) == 1:
                if not self._is_replaced():
                    return False
                if self._read():  # lines that came between the two looks
                    return True
                self._open_next()
                if len(self._fds) == 1:
                    return False
            os.close(self._fds.pop(0))
            self._rest = b""
        return False

    def close(self) -> None:
        for one in self._fds:
            os.close(one)
        self._fds, self._rest = [], b""

    def _open(self) -> None:
        if self._fds:
            return
        self._open_next()
        if self._fds and not self._is_begun:
            with contextlib.suppress(OSError):
                old = _opened(self._path.with_name(f"{self._path.name}.old"))
                if _is_same(old, self._fds[0]):  # it became the old one between the two looks
                    os.close(old)
                else:
                    self._fds.insert(0, old)
        self._is_begun = self._is_begun or bool(self._fds)

    def _open_next(self) -> None:
        try:
            self._fds.append(_opened(self._path))
        except OSError as error:
            self.problem = error.strerror or str(error)

    def _read(self) -> bool:
        """Take the file's content, up to some size; tell whether there were lines."""
        while data := os.read(self._fds[0], _READ_BYTES):
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > MAX_LINE_BYTES:
                self._rest = b""
                self.num_bad += 1
            self._lines.extend(lines)
            if lines:
                return True
        return False

    def _is_replaced(self) -> bool:
        """Tell whether the file that is read is not the last one."""
        try:
            last = os.stat(self._path)
        except OSError:
            return False
        own = os.fstat(self._fds[0])
        return (last.st_dev, last.st_ino) != (own.st_dev, own.st_ino)


def event_of(line: bytes) -> dict[str, Any] | None:
    """Read one line of a file; None for a line in another form: half of one that a crash has left."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("event"), str) else None


def _opened(path: Path) -> int:
    """Open the file. Errors: OSError, also if it is no regular file: another one may have no end."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return fd


def _is_same(first: int, second: int) -> bool:
    one, other = os.fstat(first), os.fstat(second)
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
