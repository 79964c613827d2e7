"""Puts all files that came in their places.

First every file is made under another name, where a full disk is noticed; the plan is written down; then each
name becomes the new file at once. A kill in the middle is repaired by the next sync.
"""

from __future__ import annotations

import errno
import os

from ...wire.manifest import FILE, FOLDER, LINK, Entry
from ..system.lean_stdlib import suppress
from .sync_compare import FolderComparison, sent_as
from .sync_contents import SyncContents
from .sync_folder import READ_BYTES, Folder, write_all
from .sync_record import COMING, Sent, SyncRecord, coming

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

NEW_ACROSS = b".dslaunch-new"  # ends the name of a file on its way to a file system that is mounted below
_WRITABLE = 0o300


class ChangedMeanwhile(Exception):
    """Another program has written to a file that would be replaced or removed; the message says where."""


class Commit:
    """One sync of one sender: `stage`, then `begin`, which change nothing if they fail, then `end`."""

    def __init__(
        self,
        folder: Folder,
        record: SyncRecord,
        work: FolderComparison,
        *,
        sender: str,
        senders: dict[str, str],
    ) -> None:
        """`senders`: all known senders, in words, with this one."""
        self._folder, self._record, self._work = folder, record, work
        self._sender, self._senders = sender, senders
        self._sources: list[bytes] = []  # the temporary name of each write, in their order
        self._made: list[bytes] = []  # folders
        self._opened: list[Entry] = []  # folders of ours that we could not write to

    def stage(self) -> None:
        """Make every file and link under another name, on the disk. Errors: OSError, named"""
        for path, one in self._record.sent.items():
            if one.planned and one.sender == self._sender:  # that sync was cut off
                self._folder.remove(path + NEW_ACROSS)
        left = _num_uses(self._work.writes)
        for number, entry in enumerate(self._work.writes):
            with _named(entry.path):
                self._sources.append(self._stage(entry, COMING + b"/new.%d" % number, left))
        sync_disk(self._folder.fd)

    def _stage(self, entry: Entry, spare: bytes, left: dict[bytes, int]) -> bytes:
        folder, source = self._folder, spare
        if entry.kind == LINK:
            folder.remove(spare)
            name, fd = folder.at(spare)
            os.symlink(entry.digest, name, dir_fd=fd)
            return spare
        if entry.size:
            left[entry.digest] -= 1
            if left[entry.digest]:
                _copy(folder, coming(entry.digest), spare)
            else:
                source = coming(entry.digest)
        else:
            _make(folder, spare)
        _finish(folder, source, entry)
        return source

    def begin(self, entries: list[Entry]) -> None:
        """Write down the plan, and make the folders that have a free place.

        Errors: OSError, named; ChangedMeanwhile
        """
        for path in (*self._work.removals, *(one.path for one in self._work.writes)):
            self._check(path)
        before = self._record.sent, self._record.senders
        blocked = set(self._work.removals)
        try:
            self._plan(one for one in (*self._work.folders, *self._work.writes) if one.path not in blocked)
            self._open_folders(entries)
            for entry in self._work.folders:
                if not _is_below(entry.path, blocked):
                    self._make_folder(entry)
        except OSError:
            for path in reversed(self._made):
                with suppress(OSError):
                    self._folder.remove(path)
            for entry in self._opened:
                with suppress(OSError):
                    self._folder.set_mode(entry.path, entry.mode)
            with suppress(OSError):
                self._record.write(*before)
            raise

    def _plan(self, entries: Iterable[Entry], *, gone: Iterable[bytes] = ()) -> None:
        planned = {**self._record.sent, **self._work.known}
        for path in gone:
            planned.pop(path, None)
        for one in entries:
            old = planned.get(one.path)
            if one.kind == FOLDER:
                planned[one.path] = Sent(FOLDER, b"", sender=self._sender)
            elif old is None or old.kind != one.kind or old.sender != self._sender:
                planned[one.path] = Sent(one.kind, b"", one.digest, sender=self._sender)
            else:
                planned[one.path] = old._replace(planned=one.digest)
        self._record.write(planned, self._senders)

    def _open_folders(self, entries: list[Entry]) -> None:
        """Make our own folders writable, where they are not; their modes are set at the end."""
        work = self._work
        changing = {one.path.rpartition(b"/")[0] for one in (*work.writes, *work.folders)}
        changing.update(path.rpartition(b"/")[0] for path in work.removals)
        for entry in entries:
            known = work.known.get(entry.path)
            is_mine = known is not None and known.sender == self._sender
            if entry.path in changing and entry.mode & _WRITABLE != _WRITABLE and is_mine:
                with _named(entry.path):
                    self._folder.set_mode(entry.path, entry.mode | 0o700)
                self._opened.append(entry)

    def _make_folder(self, entry: Entry) -> None:
        with _named(entry.path):
            self._folder.make_folder(entry.path, entry.mode | 0o700)
        self._made.append(entry.path)

    def _check(self, path: bytes, *, by_us: bool = False) -> None:
        """Keep a file that the host's user has written while contents came. Errors: ChangedMeanwhile"""
        if self._work.has_changed(path, by_us=by_us):
            raise ChangedMeanwhile(
                f"{os.fsdecode(path)} there was changed while this sync went on; save what is needed, and "
                "start again"
            )

    def end(self, contents: SyncContents) -> None:
        """Remove, and put in place. Errors: OSError, named; ChangedMeanwhile"""
        folder, work = self._folder, self._work
        for path in work.removals:
            self._check(path, by_us=True)
            with _named(path):
                _remove(folder, path)
        if work.removals:  # a plan has either removals or writes for each name
            # A full disk may refuse the record; the rest of the work needs less space.
            with suppress(OSError):
                self._plan((*work.folders, *work.writes), gone=work.removals)
        made = set(self._made)
        for entry in work.folders:
            if entry.path not in made:
                self._make_folder(entry)
        folder.forget()
        sent = dict(work.known)
        removed = set(work.removals)
        for entry, source in zip(work.writes, self._sources):  # noqa: B905 - `strict` needs Python 3.10
            if entry.path not in removed:
                self._check(entry.path, by_us=True)
            with _named(entry.path):
                _move(folder, source, entry)
            self._note(sent, entry, self._sender)
            if entry.kind == FILE:
                contents.add(entry.digest, entry.path)
        for entry in (*work.modes, *self._opened, *reversed(work.folders)):
            with _named(entry.path):
                folder.set_mode(entry.path, entry.mode)
            known = sent.get(entry.path)
            self._note(sent, entry, self._sender if known is None else known.sender)
        self._record.write(sent, self._senders)
        self._record.clear()

    def _note(self, sent: dict[bytes, Sent], entry: Entry, sender: str) -> None:
        found = self._folder.stat(entry.path)
        if found is not None:
            sent[entry.path] = sent_as(entry, found, sender)


def _is_below(path: bytes, blocked: set[bytes]) -> bool:
    while path:
        if path in blocked:
            return True
        path = path.rpartition(b"/")[0]
    return False


def _num_uses(writes: list[Entry]) -> dict[bytes, int]:
    left: dict[bytes, int] = {}
    for one in writes:
        if one.kind == FILE:
            left[one.digest] = left.get(one.digest, 0) + 1
    return left


def _remove(folder: Folder, path: bytes) -> None:
    try:
        folder.remove(path)
    except OSError as error:
        # A folder with files of others stays, and so does a mount point.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            raise


def _finish(folder: Folder, path: bytes, entry: Entry) -> None:
    fd = folder.open(path, os.O_WRONLY)
    try:
        os.fchmod(fd, entry.mode)
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
    finally:
        os.close(fd)


def _move(folder: Folder, source: bytes, entry: Entry) -> None:
    from_name, from_fd = folder.at(source)
    from_fd = os.dup(from_fd)
    try:
        name, fd = folder.at(entry.path)
        try:
            os.rename(from_name, name, src_dir_fd=from_fd, dst_dir_fd=fd)
        except OSError as error:
            if error.errno != errno.EXDEV or entry.kind != FILE:
                raise
            _move_across(folder, source, entry)
    finally:
        os.close(from_fd)


def _move_across(folder: Folder, source: bytes, entry: Entry) -> None:
    """Move a file to another file system that is mounted there."""
    new = entry.path + NEW_ACROSS
    try:
        _copy(folder, source, new)
        _finish(folder, new, entry)
        name, parent = folder.at(entry.path)
        os.rename(name + NEW_ACROSS, name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError:
        with suppress(OSError):
            folder.remove(new)
        raise
    folder.remove(source)


def _make(folder: Folder, path: bytes) -> None:
    folder.remove(path)
    os.close(folder.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))


def _copy(folder: Folder, source: bytes, target: bytes) -> None:
    _make(folder, target)
    read = folder.open(source)
    write = folder.open(target, os.O_WRONLY)
    try:
        while True:
            folder.beat()
            data = os.read(read, READ_BYTES)
            if not data:
                break
            write_all(write, data)
        os.fsync(write)
    finally:
        os.close(read)
        os.close(write)


def sync_disk(fd: int) -> None:
    """Wait until all data written to this file system is on its disk."""
    with suppress(Exception):
        import ctypes

        if ctypes.CDLL(None, use_errno=True).syncfs(fd) == 0:
            return
    os.sync()


class _named:
    """Gives an OSError raised inside the path within the folder as its filename."""

    def __init__(self, path: bytes) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, OSError):
            error.filename = self._path
