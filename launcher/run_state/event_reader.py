"""Reads the events of a job from their files, also while these are written."""

from __future__ import annotations

import json
import os
import stat
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_READ_BYTES = 1 << 20
MAX_LINE_BYTES = 32 << 20  # what is longer is no event


class EventReader:
    """Goes through `PATH.old`, if there is one, and `PATH`, then through what is added.

    When `PATH` is replaced by the next file, reading goes on there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fds: list[int] = []  # what is read now, and what comes after it
        self._lines: deque[bytes] = deque()
        self._rest = b""
        self._is_begun = False
        self.num_bad = 0  # lines that are no events

    def events(self) -> Iterator[dict[str, Any]]:
        """Those that are there and were not read yet; a caller that ends early gets the others later."""
        while self._lines or self._fill():
            while self._lines:
                event = event_of(self._lines.popleft())
                if event is None:
                    self.num_bad += 1
                else:
                    yield event

    def _fill(self) -> bool:
        """Read more lines, from the next file if this one is read to its end; False if there are none now."""
        self._open()
        while self._fds:
            if self._read():
                return True
            if len(self._fds) == 1:
                if not self._is_replaced():
                    return False
                if self._read():  # what came between the two looks
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
            old = _opened(self._path.with_name(f"{self._path.name}.old"))
            if old is not None and not _is_same(old, self._fds[0]):
                self._fds.insert(0, old)
            elif old is not None:  # it became the old one between the two looks
                os.close(old)
        self._is_begun = self._is_begun or bool(self._fds)

    def _open_next(self) -> None:
        new = _opened(self._path)
        if new is not None:
            self._fds.append(new)

    def _read(self) -> bool:
        """Take what is in the file, up to some size; whether there were lines."""
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
        """Whether the file that is read is not the last one."""
        try:
            last = os.stat(self._path)
        except OSError:
            return False
        own = os.fstat(self._fds[0])
        return (last.st_dev, last.st_ino) != (own.st_dev, own.st_ino)


def event_of(line: bytes) -> dict[str, Any] | None:
    """One line of a file; None for what is none: half of one that a crash has left."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("event"), str) else None


def _opened(path: Path) -> int | None:
    """None if there is no regular file: of another one there may be no end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def _is_same(first: int, second: int) -> bool:
    one, other = os.fstat(first), os.fstat(second)
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
