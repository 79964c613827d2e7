"""What is kept in a folder between two syncs: what was sent last, a lock, and contents on their way.

Sent to the nodes: standard library only.

It stands in the folder itself, not in a home, so that it goes where the folder goes: two hosts that share the
folder share this, and two that share a home do not.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time

from ..wire.manifest import OWN_FOLDER, Entry
from .lean_stdlib import suppress
from .sync_folder import Folder, write_whole

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from ..wire.fast_tuple import Record as NamedTuple

VERSION = 1
LOCK, RECORD, COMING = (OWN_FOLDER + b"/" + name for name in (b"lock", b"sent", b"coming"))
LOCK_EVERY_S = 0.05
LOCK_WITHIN_S = 300.0


class Sent(NamedTuple):
    """What we know to have put there. `planned` is another digest that it may have: that sync was cut off.

    With size, times and inode as they were then, what is in the file need not be read.
    """

    kind: str
    digest: bytes
    planned: bytes = b""
    size: int = -1
    mtime_ns: int = 0
    ctime_ns: int = 0
    inode: int = 0

    def is_as(self, found: os.stat_result) -> bool:
        """Whether the file cannot have changed since."""
        seen = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        return seen == self[3:]


class LockedOut(Exception):
    """Another one writes to this folder; the message says who."""


class Record:
    """The folder `.dslaunch` in a folder that is sent to; the one who has it has the lock."""

    def __init__(self, folder: Folder, wait_s: float = LOCK_WITHIN_S) -> None:
        """Errors: OSError if it cannot be made; LockedOut"""
        self._folder = folder
        for path in (OWN_FOLDER, COMING):
            with suppress(FileExistsError):
                folder.make_folder(path, 0o700)
        self._lock = folder.open(LOCK, os.O_RDWR | os.O_CREAT)
        try:
            self._take_lock(wait_s)
            ignored = OWN_FOLDER + b"/.gitignore"
            if folder.stat(ignored) is None:
                write_whole(folder, ignored, b"*\n")
        except BaseException:
            os.close(self._lock)
            raise
        self.sent = _read(folder)

    def _take_lock(self, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            if time.monotonic() > until:
                who = os.pread(self._lock, 200, 0).decode("utf-8", "replace").strip()
                raise LockedOut(f"{who or 'another dslaunch'} has been writing there for {wait_s:.0f} s")
            time.sleep(LOCK_EVERY_S)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)

    def unlock(self) -> None:
        os.ftruncate(self._lock, 0)
        os.close(self._lock)

    def write(self, sent: dict[bytes, Sent]) -> None:
        """Errors: OSError"""
        rows = [
            [os.fsdecode(path), one.kind, one.digest.hex(), one.planned.hex(), *one[3:]]
            for path, one in sent.items()
        ]
        write_whole(self._folder, RECORD, json.dumps([VERSION, rows]).encode("ascii"))
        self.sent = sent

    # Contents that came, by their digests.

    def has_come(self, entry: Entry) -> bool:
        found = self._folder.stat(coming(entry.digest))
        return found is not None and found.st_size == entry.size

    def clear(self) -> None:
        """What is left of syncs that were cut off, and is of no more use."""
        for name in self._folder.list(COMING):
            with suppress(OSError):
                self._folder.remove(COMING + b"/" + name)


def coming(digest: bytes) -> bytes:
    """Where a content is until it is put in its place."""
    return COMING + b"/" + digest.hex().encode()


def _read(folder: Folder) -> dict[bytes, Sent]:
    """A record that cannot be read is none: what is there then counts as another's."""
    try:
        fd = folder.open(RECORD)
    except OSError:
        return {}
    try:
        with os.fdopen(fd, "rb") as file:
            version, rows = json.loads(file.read())
        if version != VERSION:
            return {}
        return {
            os.fsencode(path): Sent(kind, bytes.fromhex(digest), bytes.fromhex(planned), *numbers)
            for path, kind, digest, planned, *numbers in rows
        }
    except (ValueError, TypeError):
        return {}
