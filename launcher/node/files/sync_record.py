"""The record kept in a folder between two syncs: which sender sent which files, a lock, and contents on their
way.

It stands in the folder itself, not in a home, so that it goes where the folder goes: two hosts that share the
folder share this, and two that share a home do not.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time

from ...wire.manifest import DIGEST_BYTES, FILE, FOLDER, OWN_FOLDER
from ..system.lean_stdlib import suppress
from .sync_folder import Folder, kind_of, write_whole
from .sync_place import Trust, Untrusted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, NamedTuple
else:
    from ...wire.fast_tuple import Record as NamedTuple

VERSION = 2  # version 1 did not name the senders
LOCK, RECORD, COMING = (OWN_FOLDER + b"/" + name for name in (b"lock", b"sent", b"coming"))
MAX_RECORD_BYTES = 1 << 28  # enough for a million files
LOCK_EVERY_S = 0.05
TOUCH_EVERY_S = 1.0


class Sent(NamedTuple):
    """The record of one name. `sender` is the sender whose sync wrote it; empty: it was found there, and is
    the host's. `planned` is another digest that it may have: that sync was cut off.

    With size, times and inode as they were then, the file's content need not be read.
    """

    kind: str
    digest: bytes
    planned: bytes = b""
    size: int = -1
    mtime_ns: int = 0
    ctime_ns: int = 0
    inode: int = 0
    sender: str = ""

    def is_as(self, found: os.stat_result) -> bool:
        """Tell whether the file cannot have changed since."""
        seen = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        return seen == self[3:7]


class LockedOut(Exception):
    """Another process writes to this folder; the message says which."""


class SyncRecord:
    """The folder `.dslaunch` in a folder that is sent to; its owner has the lock.

    `senders` describe those of `sent` in words. `doubt`: why the records of earlier syncs are unknown.
    """

    def __init__(self, folder: Folder, trust: Trust, *, silent_s: float) -> None:
        """Take the lock; wait for another owner while it works, and `silent_s` beyond.

        Errors: OSError if it cannot be made; Untrusted; LockedOut
        """
        self._folder = folder
        for path in (OWN_FOLDER, COMING):
            with suppress(FileExistsError):
                folder.make_folder(path, 0o700)
            found = folder.stat(path)
            why = "is no folder"
            if found is None or kind_of(found) == FOLDER:
                why = "" if found is None else trust.why_not(found)
            if why:
                raise Untrusted(f"{os.fsdecode(path)} there {why}; remove it there, or give another folder")
        found = folder.stat(LOCK)
        if found is not None and kind_of(found) != FILE:
            raise Untrusted(f"{os.fsdecode(LOCK)} there is no file; remove it there")
        self._lock = folder.open(LOCK, os.O_RDWR | os.O_CREAT)
        self._touched_at = 0.0
        try:
            self._take_lock(silent_s)
            ignored = OWN_FOLDER + b"/.gitignore"
            if folder.stat(ignored) is None:
                write_whole(folder, ignored, b"*\n")
        except BaseException:
            os.close(self._lock)
            raise
        self.sent, self.senders, self.doubt = _read(folder)

    def _take_lock(self, silent_s: float) -> None:
        seen, moved_at = None, time.monotonic()
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            found = self._folder.stat(LOCK)
            now, touched = time.monotonic(), None if found is None else found.st_mtime_ns
            if touched != seen:
                seen, moved_at = touched, now
            if now > moved_at + silent_s:
                who = os.pread(self._lock, 200, 0).decode("utf-8", "replace").strip() or "another dslaunch"
                raise LockedOut(
                    f"{who} is writing there, and nothing has moved for {silent_s:.0f} s; end it, or look at "
                    "its file systems"
                )
            time.sleep(LOCK_EVERY_S)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)

    def touch(self) -> None:
        """Show the processes that wait for the lock that its owner works."""
        now = time.monotonic()
        if now > self._touched_at + TOUCH_EVERY_S:
            self._touched_at = now
            with suppress(OSError):
                os.utime(self._lock)

    def unlock(self) -> None:
        with suppress(OSError):
            os.ftruncate(self._lock, 0)
        os.close(self._lock)

    def write(self, sent: dict[bytes, Sent], senders: dict[str, str]) -> None:
        """Write the record. Errors: OSError"""
        used = {one.sender for one in sent.values()}
        known = {key: words for key, words in senders.items() if key in used}
        places = {key: place for place, key in enumerate(("", *known))}
        rows = [
            [os.fsdecode(path), one.kind, one.digest.hex(), one.planned.hex(), *one[3:7], places[one.sender]]
            for path, one in sent.items()
        ]
        write_whole(self._folder, RECORD, json.dumps([VERSION, list(known.items()), rows]).encode("ascii"))
        self.sent, self.senders = sent, known

    def clear(self, wanted: Iterable[bytes] | None = ()) -> None:
        """Remove the rest of syncs that were cut off, except whole contents in `wanted`, by their digests;
        None: all whole ones stay.
        """
        names = None if wanted is None else {coming(one) for one in wanted}
        for name in self._folder.list(COMING):
            path = COMING + b"/" + name
            if _is_whole(name) if names is None else path in names:
                continue
            with suppress(OSError):
                self._folder.remove(path)


def coming(digest: bytes) -> bytes:
    """Path of a content until it is put in its place."""
    return COMING + b"/" + digest.hex().encode()


def _is_whole(name: bytes) -> bool:
    return len(name) == 2 * DIGEST_BYTES and b"." not in name


def _read(folder: Folder) -> tuple[dict[bytes, Sent], dict[str, str], str]:
    """Return the records, the senders in words, and the doubt; unknown files count as the host's."""
    try:
        fd = folder.open(RECORD)
    except OSError:
        return {}, {}, ""
    try:
        found = os.fstat(fd)
        if kind_of(found) != FILE or found.st_size > MAX_RECORD_BYTES:
            raise ValueError("no record")
        with os.fdopen(os.dup(fd), "rb") as file:
            version, *rest = json.loads(file.read(MAX_RECORD_BYTES))
        if version == 1:
            return {}, {}, "the record there is of an older dslaunch, which did not keep who sent what"
        if version != VERSION:
            return {}, {}, "the record there is of another version of dslaunch"
        return (*_sent(*rest), "")
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}, {}, "the record there cannot be read"
    finally:
        os.close(fd)


def _sent(senders: list[list[str]], rows: list[list[Any]]) -> tuple[dict[bytes, Sent], dict[str, str]]:
    """Read the rows of the record. Errors: ValueError and others of a broken record"""
    keys = ["", *(key for key, _ in senders)]
    sent: dict[bytes, Sent] = {}
    for path, kind, digest, planned, size, mtime_ns, ctime_ns, inode, place in rows:
        name = os.fsencode(path)
        if place < 0 or any(one in (b"", b".", b"..") for one in name.split(b"/")):
            raise ValueError("not below the folder")
        numbers = (size, mtime_ns, ctime_ns, inode)
        sent[name] = Sent(kind, bytes.fromhex(digest), bytes.fromhex(planned), *numbers, keys[place])
    return sent, {str(key): str(words) for key, words in senders}
