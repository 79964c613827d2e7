"""The folder that is sent, as a list: walked through once, every file with its digest."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..errors import LaunchError
from ..wire.manifest import FILE, FOLDER, LINK, OWN_FOLDER, Entry, new_digest
from .digest_cache import DigestCache, Identity, now
from .ignore import GIT_FILE, OUR_FILE, Ignored, read_exclude, read_rule_file, rules_above

READ_BYTES = 1 << 20
MAX_READS = 3  # reads of a file that changes meanwhile
_KINDS = {stat.S_IFSOCK: "socket", stat.S_IFIFO: "pipe", stat.S_IFBLK: "device", stat.S_IFCHR: "device"}


class SyncManifest(NamedTuple):
    """`skipped` are names that are neither files nor folders nor links, each with its kind. `unread_rules`
    are those of files that should have rules and have none, each with the reason.
    """

    root: bytes
    entries: tuple[Entry, ...]
    skipped: tuple[str, ...]
    unread_rules: tuple[str, ...]

    @property
    def num_files(self) -> int:
        return sum(one.kind != FOLDER for one in self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(one.size for one in self.entries)


def walk(root: bytes, *, besides: Sequence[bytes] = (), reads: bool = True) -> SyncManifest:
    """List the files of a folder that are not ignored. `besides`: absolute paths of further folders that are
    left out.

    Not `reads`: no digests, for a look at the files to send.
    Errors: LaunchError for a file that cannot be read, or changes while it is read
    """
    walker = _Walker(root, besides, DigestCache(root) if reads else None)
    try:
        walker.walk(rules_above(root, walker.note_rules))
    except OSError as error:
        name = os.fsdecode(error.filename if isinstance(error.filename, (bytes, str)) else root)
        raise LaunchError(
            f"--sync: {name} cannot be read: {error.strerror}; let it be read, or name it in .dslaunchignore"
        ) from None
    if walker.cache is not None:
        walker.cache.write()
    return SyncManifest(root, tuple(walker.entries), tuple(walker.skipped), tuple(walker.unread_rules))


class _Walker:
    def __init__(self, root: bytes, besides: Sequence[bytes], cache: DigestCache | None) -> None:
        self._root = root
        self._besides = frozenset(besides)
        self.cache = cache
        self.entries: list[Entry] = []
        self.skipped: list[str] = []
        self.unread_rules: list[str] = []

    def note_rules(self, path: bytes, why: str) -> None:
        """Note a file of rules that has none, as for git."""
        self.unread_rules.append(f"{os.fsdecode(path)} ({why})")

    def walk(self, ignored: Ignored) -> None:
        """Walk through the folder, each folder before its entries. Errors: OSError, LaunchError"""
        waiting = [self._enter(b"", ignored)]  # not by recursion: folders may be deeper than that
        while waiting:
            inner = next(waiting[-1], None)
            if inner is None:
                waiting.pop()
            else:
                waiting.append(self._enter(*inner))

    def _enter(self, path: bytes, ignored: Ignored) -> Iterator[tuple[bytes, Ignored]]:
        """Add the entries of a folder; yield each folder that is to be entered."""
        folder = os.path.join(self._root, path)
        try:
            with os.scandir(folder) as found:
                names = sorted(found, key=lambda one: one.name)
        except FileNotFoundError:
            if path:  # it was removed a moment ago, as below
                return
            raise
        listed = {one.name for one in names}
        git, ours = (
            read_rule_file(os.path.join(folder, name), self.note_rules) if name in listed else b""
            for name in (GIT_FILE, OUR_FILE)
        )
        if path and b".git" in listed:
            ignored = ignored.inside(path, read_exclude(folder, self.note_rules), b"")
        ignored = ignored.inside(path, git, ours)
        for one in names:
            inner = path + b"/" + one.name if path else one.name
            is_folder = one.is_dir(follow_symlinks=False)
            if inner == OWN_FOLDER or os.path.join(self._root, inner) in self._besides:
                continue
            if not ignored.matches(inner, is_folder=is_folder):
                with suppress(FileNotFoundError):
                    self._add(inner, one.stat(follow_symlinks=False))
                if is_folder:
                    yield inner, ignored

    def _add(self, path: bytes, found: os.stat_result) -> None:
        mode, whole = found.st_mode, os.path.join(self._root, path)
        # in a sticky folder other users could rename and remove files
        closed = 0o022 if mode & stat.S_ISVTX else 0
        entry = Entry(path, FOLDER, mode & 0o777 & ~closed, 0, found.st_mtime_ns, b"")
        if stat.S_ISLNK(mode):
            entry = entry._replace(kind=LINK, mode=0o777, digest=os.readlink(whole))
        elif stat.S_ISREG(mode):
            entry = self._file(entry, whole, found)
        elif not stat.S_ISDIR(mode):
            self.skipped.append(f"{os.fsdecode(path)} ({_KINDS.get(stat.S_IFMT(mode), 'no file')})")
            return
        self.entries.append(entry)

    def _file(self, entry: Entry, whole: bytes, found: os.stat_result) -> Entry:
        digest = b""
        if self.cache is not None:
            known = self.cache.find(entry.path, identity_of(found))
            found, digest = (found, known) if known else self._read(entry.path, whole, self.cache)
        return entry._replace(
            kind=FILE,
            mode=found.st_mode & 0o777,
            size=found.st_size,
            mtime_ns=found.st_mtime_ns,
            digest=digest,
        )

    def _read(self, path: bytes, whole: bytes, cache: DigestCache) -> tuple[os.stat_result, bytes]:
        fd = os.open(whole, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            for _ in range(MAX_READS):
                read_at, before = now(), os.fstat(fd)
                digest = new_digest()
                os.lseek(fd, 0, os.SEEK_SET)
                while data := os.read(fd, READ_BYTES):
                    digest.update(data)
                after = os.fstat(fd)
                if identity_of(before) == identity_of(after):
                    cache.add(path, identity_of(after), digest.digest(), read_at=read_at)
                    return after, digest.digest()
        except OSError as error:
            error.filename = whole
            raise
        finally:
            os.close(fd)
        raise changed(path)


def identity_of(found: os.stat_result) -> Identity:
    """Return the values that change when a file does."""
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def changed(path: bytes) -> LaunchError:
    """Return the error for a file that does not stand still."""
    return LaunchError(
        f"--sync: {os.fsdecode(path)} changed while it was read; wait until nothing writes to it, or name it "
        "in .dslaunchignore if the job does not need it"
    )
