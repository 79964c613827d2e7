"""Makes the folder of a job as it was offered.

One thread compares, takes the missing contents and puts them in place; the agent's loop passes on what
arrives and goes on with its heartbeats.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time

from ...wire.frames import Problem, Synced, SyncFrom, SyncOffer, SyncWant, Took, bytes_of
from ...wire.manifest import FILE, Entry, WrongList, contents_of, read_list, unpack_piece
from ..system.lean_stdlib import suppress
from ..system.own_addresses import own_addresses
from .sync_commit import ChangedMeanwhile, Commit
from .sync_compare import FolderComparison, SyncRules
from .sync_contents import SyncContents
from .sync_folder import Folder, digest_of, kind_of
from .sync_peer import PeerServer, PeerTimes, pull
from .sync_place import Trust, Untrusted, open_place
from .sync_record import LockedOut, SyncRecord, coming

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...wire.frames import Frame

MAX_NAMED = 3
# A factor of --prepare_timeout, so that the launcher names the host that stands still before those that wait
# for it.
BEYOND_LIMIT = 1.25
TAKE_EVERY_S = 0.5
BEAT_EVERY_S = 1.0


class _Refused(Exception):
    """The folder cannot be made as it was offered; the message says why."""


class _Abandoned(Exception):
    """The job is given up."""


class Receiver:
    """One offer. `post(frame)` may be called from any thread."""

    def __init__(self, offer: SyncOffer, post: Callable[[Frame], None]) -> None:
        self._offer = offer
        self._post = post
        self._came: queue.SimpleQueue[bytes | SyncFrom] = queue.SimpleQueue()
        self._is_over = False
        self._server: PeerServer | None = None
        self._root = _in_home(bytes_of(offer.root))
        self._times = PeerTimes.within(offer.within_s)
        self._is_changing = False
        self._beat_at = 0.0
        self._rest = b""
        self._record: SyncRecord | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def take(self, item: bytes | SyncFrom) -> None:
        """Take the next message after the offer."""
        self._came.put(item)

    def end(self) -> None:
        """End the receiver: the job starts, or is given up."""
        self._is_over = True
        if self._server is not None:
            self._server.close()

    def _run(self) -> None:
        try:
            self._post(self._receive())
        except _Abandoned:
            pass
        except (_Refused, WrongList, LockedOut, Untrusted) as error:
            self._post(Problem(f"--sync to {self._shown}: {error}", 3))
        except ChangedMeanwhile as error:
            self._post(Problem(f"--sync to {self._shown}: {error}; {self._state}", 3))
        except OSError as error:
            self._post(Problem(f"--sync to {self._shown}: {self._why(error)}", 3))
        except Exception as error:  # any error that ends the thread is reported to the launcher
            from ..system.background import print_traceback

            print_traceback()
            self._post(Problem(f"--sync to {self._shown}: {type(error).__name__}: {error}", 3))

    def _beat(self) -> None:
        """Tell the launcher that work goes on, which it would not see otherwise."""
        now = time.monotonic()
        if now > self._beat_at + BEAT_EVERY_S:
            self._beat_at = now
            self._post(Took(0))
            if self._record is not None:
                self._record.touch()

    @property
    def _shown(self) -> str:
        return os.fsdecode(self._root)

    def _why(self, error: OSError) -> str:
        name = error.filename if isinstance(error.filename, (bytes, str)) else b""
        what = f"{os.fsdecode(name)}: " if name else ""
        return f"{what}{os.strerror(error.errno) if error.errno else error}; {self._state}"

    @property
    def _state(self) -> str:
        if self._is_changing:
            return "some of its files are the new ones already, each is whole; the next sync goes on"
        return "nothing there was changed"

    def _receive(self) -> Frame:
        entries = read_list(self._next_bytes(self._offer.num_bytes))
        if not os.path.isabs(self._root) or os.path.realpath(self._root) in (b"/", os.path.realpath(_home())):
            raise _Refused("it must be the absolute path of a folder, and neither / nor a home")
        if os.path.exists(os.path.join(self._root, bytes_of(self._offer.marker))):
            return Synced(True, 0, 0, [])
        trust = Trust()
        folder = Folder(self._root, open_place(self._root, trust))
        folder.beat = self._beat
        try:
            return self._fill(folder, entries, trust)
        finally:
            folder.close()

    def _fill(self, folder: Folder, entries: list[Entry], trust: Trust) -> Frame:
        record, why_no_record = None, OSError()
        silent_s = BEYOND_LIMIT * self._offer.within_s
        try:
            record = self._record = SyncRecord(folder, trust, silent_s=silent_s)
        except OSError as error:  # a folder that is already as offered needs no writing
            why_no_record = error
        try:
            sent, doubt = ({}, "") if record is None else (record.sent, record.doubt)
            rules = SyncRules(self._offer.sender, self._offer.is_forced, trust)
            work = FolderComparison(folder, entries, sent, rules)
            if record is None and (work.refused or not work.is_empty):
                raise why_no_record
            _refuse(work, {} if record is None else record.senders, doubt, is_forced=self._offer.is_forced)
            contents = SyncContents(folder, {one.digest: one.size for one in entries if one.kind == FILE})
            for digest, path in work.place_of.items():
                contents.add(digest, path)
            self._serve(contents)
            if record is not None:
                record.clear(one.digest for one in work.writes if one.kind == FILE)
                self._take_contents(folder, entries, work, contents)
                if not work.is_empty or work.known != sent:
                    self._commit(folder, record, work, contents, entries)
            else:
                self._want([], "")
            return Synced(False, len(work.writes), len(work.removals), _notes(work, doubt))
        except OSError as error:
            if record is not None and error.errno in (errno.ENOSPC, errno.EDQUOT):
                with suppress(OSError):  # others need space on that disk as well
                    record.clear()
            raise
        finally:
            self._record = None
            if record is not None:
                with suppress(OSError):  # whole contents stay for the next time
                    record.clear(None)
                record.unlock()

    def _commit(
        self,
        folder: Folder,
        record: SyncRecord,
        work: FolderComparison,
        contents: SyncContents,
        entries: list[Entry],
    ) -> None:
        sender = self._offer.sender
        senders = {**record.senders, sender: self._offer.sent_from}
        all_of_it = Commit(folder, record, work, sender=sender, senders=senders)
        all_of_it.stage()
        all_of_it.begin(entries)
        self._is_changing = True
        all_of_it.end(contents)

    def _serve(self, contents: SyncContents) -> None:
        if self._offer.peer_token:
            with suppress(OSError):  # without a server, the launcher sends the contents to the others
                self._server = PeerServer(self._offer.peer_token, contents, self._times)

    def _want(self, contents: list[int], problem: str, num_bytes: int = 0) -> None:
        port = 0 if self._server is None else self._server.port
        self._post(SyncWant(contents, num_bytes, port, own_addresses() if port else [], problem))

    def _take_contents(
        self, folder: Folder, entries: list[Entry], work: FolderComparison, contents: SyncContents
    ) -> None:
        """Wait until all contents are there, from any source. Errors: OSError, _Refused"""
        needed = {one.digest for one in work.writes if one.kind == FILE}
        missing: list[tuple[int, Entry]] = []
        for number, one in enumerate(contents_of(entries)):
            if one.digest in needed and not self._is_there(folder, one, work, contents):
                missing.append((number, one))
        problem = ""
        while True:
            num_bytes = sum(one.size for _, one in missing)
            self._want([number for number, _ in missing], problem, num_bytes)
            if not missing:
                return
            first = self._next()
            if isinstance(first, SyncFrom):
                wanted = [one for _, one in missing]
                token = self._offer.peer_token
                num_done, problem = pull(
                    first, token, wanted, contents, times=self._times, is_over=lambda: self._is_over
                )
                if self._is_over:
                    raise _Abandoned
                missing = missing[num_done:]
                if missing:
                    continue
                return
            self._rest = first
            for _, one in missing:
                contents.begin(one)
                try:
                    self._write(one.size, contents)
                finally:
                    contents.give_up_current()
                if not contents.end():
                    raise _Refused(f"{os.fsdecode(one.path)} came other than it was announced; start again")
            return

    def _is_there(self, folder: Folder, entry: Entry, work: FolderComparison, contents: SyncContents) -> bool:
        """Tell whether the content is there under another name, or since a sync that was cut off."""
        if entry.digest in work.place_of and contents.copy(entry, work.place_of[entry.digest]):
            return True
        path = coming(entry.digest)
        found = folder.stat(path)
        if found is None or kind_of(found) != FILE or found.st_size != entry.size:
            return False
        folder.set_mode(path, 0o600)  # that sync may have set the final mode already
        fd = folder.open(path)
        try:
            if digest_of(fd, folder.beat) != entry.digest:
                return False
        finally:
            os.close(fd)
        contents.add(entry.digest, path)
        return True

    def _write(self, num_bytes: int, contents: SyncContents) -> None:
        while num_bytes:
            if not self._rest:
                self._rest = self._next_bytes(0)
            piece, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
            contents.write(piece)
            num_bytes -= len(piece)

    def _next(self) -> bytes | SyncFrom:
        """Return a piece of contents, unpacked, or the peer that has them. Errors: _Abandoned"""
        item = self._next_item()
        if isinstance(item, SyncFrom):
            return item
        self._post(Took(len(item)))
        try:
            return unpack_piece(item)
        except ValueError as error:
            raise _Refused(str(error)) from None

    def _next_item(self) -> bytes | SyncFrom:
        while not self._is_over:
            with suppress(queue.Empty):
                return self._came.get(timeout=TAKE_EVERY_S)
            if self._record is not None:
                self._record.touch()
        raise _Abandoned

    def _next_bytes(self, num_bytes: int) -> bytes:
        """Return so many bytes unchanged; 0: one piece of contents."""
        if not num_bytes:
            piece = self._next()
            if not isinstance(piece, bytes):
                raise _Refused("it was told to turn to a peer in the middle of a content")
            return piece
        parts: list[bytes] = []
        while num_bytes > 0:
            item = self._next_item()
            if not isinstance(item, bytes):
                raise _Refused("it was told to turn to a peer in the middle of the list")
            self._post(Took(len(item)))
            parts.append(item)
            num_bytes -= len(item)
        return b"".join(parts)


def _refuse(work: FolderComparison, senders: dict[str, str], doubt: str, *, is_forced: bool) -> None:
    """Errors: _Refused if a file or folder stands there that may not be changed"""
    if work.foreign:
        raise _Refused(_why_foreign(work.foreign))
    if work.refused:
        raise _Refused(_why_refused(work.refused, senders, doubt, is_forced=is_forced))


def _why_refused(
    refused: list[tuple[bytes, str]], senders: dict[str, str], doubt: str, *, is_forced: bool
) -> str:
    clauses = []
    for sender in dict.fromkeys(sender for _, sender in refused):
        paths = [path for path, whose in refused if whose == sender]
        words = senders.get(sender, "")
        if sender and words:
            clauses.append(f"{_named(paths)} sent from {words}, not from here")
        else:
            clauses.append(f"{_named(paths)} not sent from here, or changed there since")
    is_of_another = any(sender for _, sender in refused)
    hint = "give each sender a folder of its own, as with cwd= in the hostfile, or " if is_of_another else ""
    force = ", or overwrite it with --sync_force (never a folder with such files in it)"
    if is_forced:
        force = "; a folder with such files in it is never overwritten"
    return (
        f"{'; '.join(clauses)}{f' ({doubt})' if doubt else ''}; {hint}save what is needed, then remove it "
        f"there{force}"
    )


def _named(paths: list[bytes]) -> str:
    return f"{_some(paths)} there {'was' if len(paths) == 1 else 'were'}"


def _some(paths: list[bytes]) -> str:
    named = ", ".join(os.fsdecode(one) for one in paths[:MAX_NAMED])
    return named + (f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else "")


def _why_foreign(foreign: list[tuple[bytes, str]]) -> str:
    path, why = foreign[0]
    more = f" ({len(foreign) - 1} more such folders)" if len(foreign) > 1 else ""
    return (
        f"the folder {os.fsdecode(path)} there {why}{more}, so it is not filled, and nothing runs from it; "
        "let it be this user's or root's, and writable for no other (chmod go-w), or remove it"
    )


def _notes(work: FolderComparison, doubt: str) -> list[str]:
    notes = [f"stays, for it was changed there: {os.fsdecode(one)}" for one in work.kept]
    if work.kept_modes:
        which = f"{_some(work.kept_modes)}, which {'was' if len(work.kept_modes) == 1 else 'were'}"
        notes.append(
            f"the mode there stays another one than here: {which} not sent from here (--sync_force sets it)"
        )
    if doubt:
        notes.append(f"{doubt}: what was sent before counts as the host's, and is not removed or changed")
    return notes


def _home() -> bytes:
    return os.path.expanduser(b"~")


def _in_home(path: bytes) -> bytes:
    return os.path.join(_home(), path[2:]) if path.startswith(b"~/") else path
