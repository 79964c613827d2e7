"""What has to be done so that a folder is as it was offered, and what stands against it.

Sent to the nodes: standard library only. Nothing is changed here.
"""

from __future__ import annotations

import os

from ..wire.manifest import FILE, FOLDER, LINK, OWN_FOLDER, Entry
from .sync_folder import Folder, kind_of
from .sync_record import Sent


class Comparison:
    """`refused` are names that stand there and are not ours to change; the rest is work, in the order of the
    list. `same`: what is right already, with what will be known of it; `place_of`: where a content is there.
    """

    def __init__(
        self, folder: Folder, entries: list[Entry], sent: dict[bytes, Sent], *, is_forced: bool
    ) -> None:
        """Errors: OSError"""
        self._folder = folder
        self._sent = sent
        self._is_forced = is_forced
        self.refused: list[bytes] = []
        self.kept: list[bytes] = []  # removed here, changed there
        self.folders: list[Entry] = []
        self.writes: list[Entry] = []
        self.modes: list[Entry] = []
        self.removals: list[bytes] = []  # a folder after what is in it
        self.same: dict[bytes, Sent] = {}
        self.place_of: dict[bytes, bytes] = {}
        for one in entries:
            self._compare(one)
        self._remove_others({one.path for one in entries})
        self._find_moved()

    @property
    def is_empty(self) -> bool:
        return not (self.folders or self.writes or self.modes or self.removals)

    def _compare(self, entry: Entry) -> None:
        found = self._folder.stat(entry.path)
        if found is None:
            (self.folders if entry.kind == FOLDER else self.writes).append(entry)
            return
        kind = kind_of(found)
        if kind != entry.kind:
            self._replace(entry, found)
            return
        old = self._sent.get(entry.path)
        if kind == FOLDER:
            self.same[entry.path] = Sent(FOLDER, b"")
            if old is not None and found.st_mode & 0o777 != entry.mode:
                self.modes.append(entry)
            return
        content = self._content(entry.path, found, old, size=entry.size)
        if content == entry.digest:
            self._keep(entry, found, kind)
        elif self._is_forced or _is_ours(kind, content, old):
            self.writes.append(entry)
        else:
            self.refused.append(entry.path)

    def _keep(self, entry: Entry, found: os.stat_result, kind: str) -> None:
        self.same[entry.path] = sent_as(entry, found)
        if kind == FILE:
            self.place_of.setdefault(entry.digest, entry.path)
            if found.st_mode & 0o777 != entry.mode:
                self.modes.append(entry)

    def _content(self, path: bytes, found: os.stat_result, old: Sent | None, *, size: int) -> bytes:
        """Empty if it is neither what we sent nor what we would send."""
        if kind_of(found) == LINK:
            return self._folder.link_target(path)
        if old is not None and old.kind == FILE:
            if old.digest and old.is_as(found):
                return old.digest
        elif found.st_size != size:
            return b""
        return self._folder.digest(path)

    def _replace(self, entry: Entry, found: os.stat_result) -> None:
        """Something of another kind stands there."""
        if kind_of(found) == FOLDER:
            inner = self._all_ours_in(entry.path)
            if inner is None:
                self.refused.append(entry.path)
                return
            self.removals += [*inner, entry.path]
        elif not self._is_forced and not self._is_unchanged(entry.path, found):
            self.refused.append(entry.path)
            return
        else:
            self.removals.append(entry.path)
        (self.folders if entry.kind == FOLDER else self.writes).append(entry)

    def _all_ours_in(self, path: bytes) -> list[bytes] | None:
        """All that is in a folder, what is deepest first; None if anything is not ours."""
        all_names: list[bytes] = []
        if path not in self._sent:
            return None
        for name in self._folder.list(path):
            inner = path + b"/" + name
            found = self._folder.stat(inner)
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
        old = self._sent.get(path)
        kind = kind_of(found)
        if old is None or old.kind != kind:
            return False
        return _is_ours(kind, self._content(path, found, old, size=-1), old)

    def _remove_others(self, wanted: set[bytes]) -> None:
        """What was sent once, and is not in the list any more."""
        known = set(self.removals)
        for path in sorted(self._sent.keys() - wanted - known, reverse=True):
            found = self._folder.stat(path)
            if found is None or path.split(b"/", 1)[0] == OWN_FOLDER:
                continue
            if kind_of(found) == FOLDER:
                is_ours = self._sent[path].kind == FOLDER
            else:
                is_ours = self._is_unchanged(path, found)
            if is_ours:
                self.removals.append(path)
            else:
                self.kept.append(path)

    def _find_moved(self) -> None:
        """Contents that are there under other names need not be sent."""
        wanted = {one.digest for one in self.writes if one.kind == FILE} - self.place_of.keys()
        for path, old in self._sent.items() if wanted else ():
            if old.digest in wanted and old.kind == FILE:
                found = self._folder.stat(path)
                if found is not None and old.is_as(found):
                    self.place_of.setdefault(old.digest, path)


def sent_as(entry: Entry, found: os.stat_result) -> Sent:
    """What is to be remembered of something that is as the list says."""
    if entry.kind != FILE:
        return Sent(entry.kind, entry.digest if entry.kind == LINK else b"")
    return Sent(FILE, entry.digest, b"", found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def _is_ours(kind: str, content: bytes, old: Sent | None) -> bool:
    return old is not None and old.kind == kind and bool(content) and content in (old.digest, old.planned)
