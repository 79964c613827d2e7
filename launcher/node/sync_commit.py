"""Everything that came is put in its place. Sent to the nodes: standard library only.

Each name is the old or the new one at any moment; a kill in the middle is repaired by the next sync, for what
is planned is written down before.
"""

from __future__ import annotations

import errno
import os

from ..wire.manifest import FILE, FOLDER, LINK, Entry
from .lean_stdlib import suppress
from .sync_compare import Comparison, sent_as
from .sync_contents import Contents
from .sync_folder import READ_BYTES, Folder, write_all
from .sync_record import COMING, Record, Sent, coming

_SPARE = COMING + b"/new"
_WRITABLE = 0o300


def commit(
    folder: Folder, record: Record, work: Comparison, contents: Contents, entries: list[Entry]
) -> None:
    """Errors: OSError, with the name below the folder as its filename"""
    sync_disk(folder.fd)
    _open_folders(folder, entries, work)
    for path in work.removals:  # before the plan is written down, which knows one kind for each name
        with _named(path):
            _remove(folder, path)
    record.write({**record.sent, **work.same, **_planned(work, record.sent)})
    for entry in work.folders:
        with _named(entry.path):
            folder.make_folder(entry.path, entry.mode | 0o700)
    folder.forget()
    sent = dict(work.same)
    left = _num_uses(work.writes)
    for entry in work.writes:
        with _named(entry.path):
            found = _write(folder, entry, left)
        sent[entry.path] = sent_as(entry, found)
        if entry.kind == FILE:
            contents.add(entry.digest, entry.path)
    for entry in (*work.modes, *reversed(work.folders)):
        with _named(entry.path):
            folder.set_mode(entry.path, entry.mode)
        found_now = folder.stat(entry.path)
        if found_now is not None:
            sent[entry.path] = sent_as(entry, found_now)
    record.write(sent)
    record.clear()


def _planned(work: Comparison, sent: dict[bytes, Sent]) -> dict[bytes, Sent]:
    planned = {one.path: Sent(FOLDER, b"") for one in work.folders}
    for one in work.writes:
        old = sent.get(one.path)
        if old is None or old.kind != one.kind:
            planned[one.path] = Sent(one.kind, b"", one.digest)
        else:
            planned[one.path] = old._replace(planned=one.digest)
    return planned


def _num_uses(writes: list[Entry]) -> dict[bytes, int]:
    left: dict[bytes, int] = {}
    for one in writes:
        if one.kind == FILE:
            left[one.digest] = left.get(one.digest, 0) + 1
    return left


def _open_folders(folder: Folder, entries: list[Entry], work: Comparison) -> None:
    """Let our own folders be written to, where they are not; their modes are set at the end."""
    changing = {one.path.rpartition(b"/")[0] for one in (*work.writes, *work.folders)}
    changing.update(path.rpartition(b"/")[0] for path in work.removals)
    for entry in entries:
        if entry.path in changing and entry.mode & _WRITABLE != _WRITABLE and entry.path in work.same:
            with _named(entry.path):
                folder.set_mode(entry.path, entry.mode | 0o700)
            work.modes.append(entry)


def _remove(folder: Folder, path: bytes) -> None:
    try:
        folder.remove(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # a folder with files of others stays
            raise


def _write(folder: Folder, entry: Entry, left: dict[bytes, int]) -> os.stat_result:
    source = _SPARE
    if entry.kind == LINK:
        folder.remove(_SPARE)
        name, fd = folder.at(_SPARE)
        os.symlink(entry.digest, name, dir_fd=fd)
    elif not entry.size:
        _make(folder, _SPARE)
    else:
        left[entry.digest] -= 1
        if left[entry.digest]:
            _copy(folder, coming(entry.digest), _SPARE)
        else:
            source = coming(entry.digest)
    if entry.kind == FILE:
        fd = folder.open(source, os.O_WRONLY)
        try:
            os.fchmod(fd, entry.mode)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)
    _move(folder, source, entry)
    found = folder.stat(entry.path)
    if found is None:
        raise OSError(errno.ENOENT, "it is gone again")
    return found


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
    """To another file system that is mounted there."""
    new = entry.path + b".dslaunch-new"
    _copy(folder, source, new)
    fd = folder.open(new, os.O_WRONLY)
    try:
        os.fchmod(fd, entry.mode)
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
    finally:
        os.close(fd)
    name, parent = folder.at(entry.path)
    os.rename(name + b".dslaunch-new", name, src_dir_fd=parent, dst_dir_fd=parent)
    folder.remove(source)


def _make(folder: Folder, path: bytes) -> int:
    folder.remove(path)
    fd = folder.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.close(fd)
    return fd


def _copy(folder: Folder, source: bytes, target: bytes) -> None:
    _make(folder, target)
    read = folder.open(source)
    write = folder.open(target, os.O_WRONLY)
    try:
        while True:
            data = os.read(read, READ_BYTES)
            if not data:
                break
            write_all(write, data)
        os.fsync(write)
    finally:
        os.close(read)
        os.close(write)


def sync_disk(fd: int) -> None:
    """Everything that was written to this file system is on its disk."""
    with suppress(Exception):
        import ctypes

        if ctypes.CDLL(None, use_errno=True).syncfs(fd) == 0:
            return
    os.sync()


class _named:
    """An OSError within has the name in the folder as its filename."""

    def __init__(self, path: bytes) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, OSError):
            error.filename = self._path
