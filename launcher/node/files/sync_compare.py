"""Compares a folder with the list that was offered: work to do, and objections to it.

Nothing is changed here.

Only files that this sender wrote are changed or removed. A file that was found there, equal or not, is the
host's, and a file that another sender wrote is that sender's.
"""

from __future__ import annotations

import os

from ...wire.manifest import FILE, FOLDER, LINK, OWN_FOLDER, Entry
from .sync_folder import Folder, kind_of
from .sync_place import Trust
from .sync_record import Sent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from ...wire.fast_tuple import Record as NamedTuple


class SyncRules(NamedTuple):
    """The sender, and whether (`is_forced`) files that it did not write may be changed too."""

    sender: str
    is_forced: bool
    trust: Trust


class FolderComparison:
    """`refused` are names that stand there and are not ours to change, each with its owner (`Sent.sender`);
    `foreign` are those of other users, each with a clause. The rest is work, in the order of the list.

    `known`: names that are right already, or another sender's, with their new records; `place_of`: the path
    of a content that is there.
    """

    def __init__(
        self, folder: Folder, entries: list[Entry], sent: dict[bytes, Sent], rules: SyncRules
    ) -> None:
        """Errors: OSError"""
        self._folder = folder
        self._sent = sent
        self._rules = rules
        self.refused: list[tuple[bytes, str]] = []
        self.foreign: list[tuple[bytes, str]] = []
        self.kept: list[bytes] = []  # removed here, changed there
        self.kept_modes: list[bytes] = []  # equal there, but for the mode
        self.folders: list[Entry] = []
        self.writes: list[Entry] = []
        self.modes: list[Entry] = []
        self.removals: list[bytes] = []  # a folder after its entries
        self.known: dict[bytes, Sent] = {}
        self.place_of: dict[bytes, bytes] = {}
        self._seen: dict[bytes, os.stat_result | None] = {}  # status of each path that is written or removed
        for one in entries:
            self._compare(one)
        self._remove_others({one.path for one in entries})
        self._keep_of_others()
        self._find_moved()
        changing = {one.path for one in self.writes} | set(self.removals)
        self._seen = {path: found for path, found in self._seen.items() if path in changing}

    @property
    def is_empty(self) -> bool:
        return not (self.folders or self.writes or self.modes or self.removals)

    def has_changed(self, path: bytes, *, by_us: bool = False) -> bool:
        """Tell whether the file at the name of a write or a removal is another than at the comparison.

        `by_us`: a hard link of it may have been replaced or removed by now, which its ctime shows.
        """
        seen, found = self._seen[path], self._folder.stat(path)
        if self._rules.is_forced or (seen is None and found is None):
            return False
        if seen is None or found is None or kind_of(seen) != kind_of(found):
            return found is not None
        if kind_of(found) == FOLDER:
            return False  # it is removed only if it is empty
        before, now = _marks(seen), _marks(found)
        return before[by_us:] != now[by_us:]

    def _compare(self, entry: Entry) -> None:
        found = self._seen[entry.path] = self._folder.stat(entry.path)
        if found is None:
            (self.folders if entry.kind == FOLDER else self.writes).append(entry)
            return
        kind = kind_of(found)
        why_foreign = self._why_foreign(entry, found)
        if kind == FOLDER and why_foreign and not self._may_be_closed(entry, found):
            self.foreign.append((entry.path, why_foreign))
        elif kind != entry.kind:
            self._replace(entry, found)
        elif kind == FOLDER:
            self._keep_folder(entry, found)
        else:
            old = self._sent.get(entry.path)
            content = self._content(entry.path, found, old, size=entry.size)
            writer = old.sender if old is not None and _is_as_sent(kind, content, old) else ""
            if content == entry.digest and not why_foreign:
                self._keep(entry, found, writer)
            elif writer == self._rules.sender or self._rules.is_forced:
                self.writes.append(entry)
            else:
                self.refused.append((entry.path, writer))

    def _why_foreign(self, entry: Entry, found: os.stat_result) -> str:
        """Return a clause if it is another user's, or a folder open to others, unlike the offered one."""
        allowed = entry.mode if kind_of(found) == FOLDER else 0o777
        return self._rules.trust.why_not(found, allowed=allowed)

    def _may_be_closed(self, entry: Entry, found: os.stat_result) -> bool:
        """Tell whether this sender had opened a folder to others, and nothing of theirs is in it."""
        is_open = not self._rules.trust.why_not(found, allowed=0o777)
        return entry.kind == FOLDER and is_open and self._all_ours_in(entry.path) is not None

    def _is_mine(self, old: Sent | None) -> bool:
        return old is not None and old.sender == self._rules.sender

    def _keep_folder(self, entry: Entry, found: os.stat_result) -> None:
        old = self._sent.get(entry.path)
        if old is not None and old.kind == FOLDER and self._is_mine(old):
            self.known[entry.path] = old
            if found.st_mode & 0o777 != entry.mode:
                self.modes.append(entry)

    def _keep(self, entry: Entry, found: os.stat_result, writer: str) -> None:
        self.known[entry.path] = sent_as(entry, found, writer)
        if entry.kind == FILE:
            self.place_of.setdefault(entry.digest, entry.path)
            if found.st_mode & 0o777 != entry.mode:
                if writer == self._rules.sender or self._rules.is_forced:
                    self.modes.append(entry)
                else:
                    self.kept_modes.append(entry.path)

    def _content(self, path: bytes, found: os.stat_result, old: Sent | None, *, size: int) -> bytes:
        """Return a file's digest or a link's target; empty if a file's size shows that it differs."""
        if kind_of(found) == LINK:
            return self._folder.link_target(path)
        if old is not None and old.kind == FILE:
            if old.digest and old.is_as(found):
                return old.digest
        elif found.st_size != size:
            return b""
        return self._folder.digest(path)

    def _replace(self, entry: Entry, found: os.stat_result) -> None:
        """Plan to replace an entry of another kind."""
        if kind_of(found) == FOLDER:
            inner = self._all_ours_in(entry.path)
            if inner is None:
                self.refused.append((entry.path, ""))
                return
            self.removals += [*inner, entry.path]
        elif not self._rules.is_forced and not self._is_unchanged(entry.path, found):
            self.refused.append((entry.path, ""))
            return
        else:
            self.removals.append(entry.path)
        (self.folders if entry.kind == FOLDER else self.writes).append(entry)

    def _all_ours_in(self, path: bytes) -> list[bytes] | None:
        """Return all entries of a folder, the deepest first; None if any of them is not ours."""
        all_names: list[bytes] = []
        if not self._is_mine(self._sent.get(path)):
            return None
        for name in self._folder.list(path):
            inner = path + b"/" + name
            found = self._seen[inner] = self._folder.stat(inner)
            if found is not None and kind_of(found) == FOLDER:
                below = self._all_ours_in(inner)
                if below is None:
                    return None
                all_names += below
            elif found is not None and not self._is_unchanged(inner, found):
                return None
            all_names.append(inner)
        return all_names

    def _is_unchanged(self, path: bytes, found: os.stat_result) -> bool:
        """Tell whether it is as this sender wrote it."""
        old = self._sent.get(path)
        kind = kind_of(found)
        if old is None or old.kind != kind or not self._is_mine(old):
            return False
        return kind == FOLDER or _is_as_sent(kind, self._content(path, found, old, size=-1), old)

    def _remove_others(self, wanted: set[bytes]) -> None:
        """Plan to remove files that this sender sent once, and that are not in its list any more."""
        mine = {path for path, old in self._sent.items() if self._is_mine(old)}
        for path in sorted(mine - wanted - set(self.removals), reverse=True):
            found = self._seen[path] = self._folder.stat(path)
            if found is None or path.split(b"/", 1)[0] == OWN_FOLDER:
                continue
            if self._is_unchanged(path, found):
                self.removals.append(path)
            else:
                self.kept.append(path)

    def _keep_of_others(self) -> None:
        """Keep the records of other senders' files, unless these are overwritten."""
        changed = {one.path for one in (*self.folders, *self.writes)} | set(self.removals)
        for path, old in self._sent.items():
            if old.sender and not self._is_mine(old) and path not in changed:
                self.known.setdefault(path, old)

    def _find_moved(self) -> None:
        """Find contents that are there under other names: they need not be sent."""
        wanted = {one.digest for one in self.writes if one.kind == FILE} - self.place_of.keys()
        for path, old in self._sent.items() if wanted else ():
            if old.digest in wanted and old.kind == FILE:
                found = self._folder.stat(path)
                if found is not None and old.is_as(found):
                    self.place_of.setdefault(old.digest, path)


def sent_as(entry: Entry, found: os.stat_result, sender: str) -> Sent:
    """Return the record of a name that is as the list says."""
    if entry.kind != FILE:
        return Sent(entry.kind, entry.digest if entry.kind == LINK else b"", sender=sender)
    return Sent(
        FILE, entry.digest, b"", found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, sender
    )


def _marks(found: os.stat_result) -> tuple[int, ...]:
    return found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_ino


def _is_as_sent(kind: str, content: bytes, old: Sent | None) -> bool:
    return old is not None and old.kind == kind and bool(content) and content in (old.digest, old.planned)
