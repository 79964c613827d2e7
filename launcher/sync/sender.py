"""Sends one folder to many hosts: each is offered the list, asks for the contents that it lacks, and gets
them, from here or from a host that has them.

With many hosts and much to send, only the first gets everything from here. Every host that is told to take
contents from another may have two that take them from it, while it still gets them itself: so the bytes that
this machine sends do not grow with the number of hosts.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import LaunchError
from ..wire.frames import Chunk, Synced, SyncFrom, SyncOffer, SyncWant, text_of
from ..wire.manifest import PIECE_BYTES, WINDOW_BYTES, Entry, contents_of, pack_piece, write_list
from ..wording import count, shown_size
from .manifest import SyncManifest, changed
from .origin import origin_of
from .target import Marker, SyncTarget

DIRECT_HOSTS = 4  # so few hosts all get everything from here
DIRECT_BYTES = 8 << 20  # and each of them at most so much
MAX_CHILDREN = 2  # hosts that take from one at the same time
MAX_SENDING = 16  # hosts that are sent contents from here at the same time
LOOK_EVERY_S = 0.2


class Tree(NamedTuple):
    """The tree in which hosts take from each other."""

    above_hosts: int = DIRECT_HOSTS
    above_bytes: int = DIRECT_BYTES


DEFAULT_TREE = Tree()


class _Progress:
    """The progress of one host."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)
        self.port = 0
        self.children: set[SyncTarget] = set()
        self.parent: SyncTarget | None = None
        self.depth = 0
        self.num_bytes = 0  # bytes that it lacks
        self.moved_at = time.monotonic()
        self.done: Synced | None = None
        self.num_ours = 0  # threads of ours that have bytes for it
        self._allowed = WINDOW_BYTES
        self._changed = threading.Condition()

    def grant(self, num_bytes: int) -> None:
        self.moved_at = time.monotonic()
        with self._changed:
            self._allowed += num_bytes
            self._changed.notify_all()

    def take(self, num_bytes: int, is_over: Callable[[], bool]) -> bool:
        """Wait until so much may be sent; False if nothing more is to be sent."""
        with self._changed:
            while self._allowed < min(num_bytes, WINDOW_BYTES):
                if is_over():
                    return False
                self._changed.wait(LOOK_EVERY_S)
            self._allowed -= num_bytes
            self.moved_at = time.monotonic()
        return not is_over()

    @property
    def waits_for_us(self) -> bool:
        """Tell whether it has dealt with all sent bytes, and more are to come."""
        return self.num_ours > 0 and self._allowed >= WINDOW_BYTES


class Sender:
    """Sends one folder, once. All methods but `grant` are called by one thread."""

    def __init__(
        self,
        manifest: SyncManifest,
        *,
        num_hosts: int,
        limit_s: float,
        fail: Callable[[str], None],
        is_forced: bool = False,
        tree: Tree = DEFAULT_TREE,
    ) -> None:
        """`limit_s`: without a sign for so long a host counts as stuck."""
        self._manifest = manifest
        self._origin = origin_of(manifest.root)
        self._limit_s = limit_s
        self._list = write_list(manifest.entries)
        self._contents = contents_of(manifest.entries)
        self._fail = fail
        self._is_forced = is_forced
        self._tree = tree
        self._token = secrets.token_hex(16) if num_hosts > tree.above_hosts else ""
        self._marker = Marker(manifest.root)
        self._hosts: dict[SyncTarget, _Progress] = {}
        self._places = threading.BoundedSemaphore(MAX_SENDING)
        self._lock = threading.Lock()
        # by thread: the file that it reads now, and since when
        self._reading: dict[int, tuple[bytes, float]] = {}
        self._num_sent = 0

    def offer(self, host: SyncTarget, root: str, addresses: Sequence[str]) -> None:
        """Offer the list. The other hosts may reach it at these addresses, besides those that it names
        itself.
        """
        progress = self._hosts[host] = _Progress(addresses)
        marker = text_of(self._marker.path)
        host.send(
            SyncOffer(
                root=root,
                marker=marker,
                is_forced=self._is_forced,
                num_bytes=len(self._list),
                peer_token=self._token,
                sender=self._origin.key,
                sent_from=self._origin.words,
                within_s=self._limit_s,
            )
        )
        pieces = (self._list[at : at + PIECE_BYTES] for at in range(0, len(self._list), PIECE_BYTES))
        if len(self._list) <= WINDOW_BYTES:
            for piece in pieces:
                self._send(host, progress, piece)
        else:
            self._in_thread(host, progress, pieces)

    def grant(self, host: SyncTarget, num_bytes: int) -> None:
        """Note that the host has dealt with so many bytes. May be called from any thread."""
        self._hosts[host].grant(num_bytes)

    def want(self, host: SyncTarget, item: SyncWant) -> str:
        """Take a host's request. Return why it cannot be met; "" if it can."""
        progress = self._hosts[host]
        if any(not 0 <= number < len(self._contents) for number in item.contents):
            return "a content that is not in the list"
        progress.port, progress.num_bytes, progress.moved_at = item.port, item.num_bytes, time.monotonic()
        progress.addresses = [
            *progress.addresses,
            *(one for one in item.addresses if one not in progress.addresses),
        ]
        self._release_parent(host)
        if item.contents:
            parent = None if item.problem else self._choose_parent(host, item.num_bytes)
            if parent is None:
                self._in_thread(host, progress, self._pieces(item.contents))
            else:
                self._hosts[parent].children.add(host)
                progress.parent, progress.depth = parent, self._hosts[parent].depth + 1
                host.send(SyncFrom(self._hosts[parent].addresses, self._hosts[parent].port))
        return ""

    def end(self, host: SyncTarget, item: Synced) -> None:
        """Note that it has everything."""
        self._hosts[host].done = item
        self._release_parent(host)

    def is_asked(self, host: SyncTarget) -> bool:
        """Tell whether it may send frames about files."""
        return host in self._hosts and self._hosts[host].done is None

    def is_stuck(self, host: SyncTarget, now: float) -> bool:
        """Tell whether nothing has moved there for too long, while it did not wait for us."""
        progress = self._hosts.get(host)
        if progress is None or progress.done is not None or progress.waits_for_us:
            return False
        return progress.moved_at < now - self._limit_s

    def stuck_file(self, now: float) -> str:
        """Return a file here that could not be read for too long; empty if there is none."""
        late = (path for path, since in list(self._reading.values()) if since < now - self._limit_s)
        return os.fsdecode(next(late, b""))

    def is_done(self, host: SyncTarget) -> bool:
        return host not in self._hosts or self._hosts[host].done is not None

    @property
    def num_sent(self) -> int:
        """Number of bytes that left this machine: of lists and contents."""
        return self._num_sent

    def close(self) -> None:
        """Remove the marker: every host has looked whether the folder is its own."""
        self._marker.close()

    def summary(self) -> str:
        """Return one line, when all are done."""
        done = [(host, one.done) for host, one in self._hosts.items() if one.done is not None]
        shared = sorted(host.name for host, one in done if one.is_shared)
        others = [one for _, one in done if not one.is_shared]
        parts = []
        if others:
            lacking = sum(self._hosts[host].num_bytes for host, one in done if not one.is_shared)
            written = sum(one.num_written for one in others)
            removed = sum(one.num_removed for one in others)
            what = f"{count(written, 'file')} written" + (f", {removed} removed" if removed else "")
            if not written and not removed:
                what = "all was there"
            how_much = f"{shown_size(lacking)} lacking, {shown_size(self._num_sent)} sent from here"
            parts.append(f"{count(len(others), 'host')}: {what} ({how_much})")
        if shared:
            parts.append(
                f"{', '.join(shared[:4])}{' and others' * (len(shared) > 4)}: the same folder as here"
            )
        number = count(self._manifest.num_files, "file")
        return (
            f"--sync: {number}, {shown_size(self._manifest.num_bytes)}; {'; '.join(parts)}" if parts else ""
        )

    def notes(self) -> list[str]:
        """Return notes for the user, with the host."""
        return [
            f"{host.name}: {note}" for host, one in self._hosts.items() if one.done for note in one.done.notes
        ]

    def _choose_parent(self, host: SyncTarget, num_bytes: int) -> SyncTarget | None:
        if not self._token or num_bytes <= self._tree.above_bytes:
            return None
        able = [
            (progress.depth, place, one)
            for place, (one, progress) in enumerate(self._hosts.items())
            if progress.port
            and one is not host
            and not one.is_over
            and len(progress.children) < MAX_CHILDREN
            and not self._stems_from(one, host)
        ]
        return min(able)[2] if able else None

    def _stems_from(self, one: SyncTarget, host: SyncTarget) -> bool:
        parent: SyncTarget | None = one
        while parent is not None:
            if parent is host:
                return True
            parent = self._hosts[parent].parent
        return False

    def _release_parent(self, host: SyncTarget) -> None:
        parent = self._hosts[host].parent
        if parent is not None:
            self._hosts[parent].children.discard(host)
            self._hosts[host].parent = None

    def _in_thread(self, host: SyncTarget, progress: _Progress, pieces: Iterator[bytes]) -> None:
        def work() -> None:
            try:
                with self._places:
                    for piece in pieces:
                        if not self._send(host, progress, piece):
                            return
            except LaunchError as error:
                self._fail(str(error))
            finally:
                with self._lock:
                    progress.num_ours -= 1

        with self._lock:
            progress.num_ours += 1
        threading.Thread(target=work, name=f"files to {host.name}", daemon=True).start()

    def _send(self, host: SyncTarget, progress: _Progress, piece: bytes) -> bool:
        if not progress.take(len(piece), lambda: host.is_over):
            return False
        host.send(Chunk(piece))
        with self._lock:
            self._num_sent += len(piece)
        return True

    def _pieces(self, numbers: Sequence[int]) -> Iterator[bytes]:
        """Yield contents one after the other, packed. Errors: LaunchError if a file has changed"""
        waiting = bytearray()
        for number in numbers:
            for data in self._read(self._contents[number]):
                waiting += data
                while len(waiting) >= PIECE_BYTES:
                    yield pack_piece(bytes(waiting[:PIECE_BYTES]))
                    del waiting[:PIECE_BYTES]
        if waiting:
            yield pack_piece(bytes(waiting))

    @contextmanager
    def _reads(self, path: bytes) -> Iterator[None]:
        me = threading.get_ident()
        self._reading[me] = path, time.monotonic()
        try:
            yield
        finally:
            del self._reading[me]

    def _read(self, entry: Entry) -> Iterator[bytes]:
        path = os.path.join(self._manifest.root, entry.path)
        try:
            with self._reads(path):
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(fd, "rb", buffering=0) as file:
                left = entry.size
                while left:
                    with self._reads(path):
                        data = file.read(min(left, PIECE_BYTES))
                    if not data:
                        break
                    left -= len(data)
                    yield data
                found = os.fstat(fd)
        except OSError as error:
            why = error.strerror
            raise LaunchError(f"--sync: {os.fsdecode(path)} cannot be read any more: {why}") from None
        if left or (found.st_size, found.st_mtime_ns) != (entry.size, entry.mtime_ns):
            raise changed(entry.path)
