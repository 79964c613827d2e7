"""Contents from host to host.

A host that knows the token of this job may ask for contents by their digests. They are sent unchanged and in
clear; the receiver compares the digests.
"""

from __future__ import annotations

import hmac
import os
import socket
import threading
import time

from ..system.lean_stdlib import suppress
from ..system.listener import listen_on_all
from .sync_contents import SyncContents

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import NamedTuple

    from ...wire.frames import SyncFrom
    from ...wire.manifest import Entry
else:
    from ...wire.fast_tuple import Record as NamedTuple

MAX_CONNECTIONS = 64
GREETING_S = 10.0
SILENT_S = 30.0
CONNECT_S = 5.0
ACCEPT_AGAIN_S = 0.1
_TOKEN_BYTES = 32
_DIGEST_BYTES = 20
_YES, _NO = b"\1", b"\0"
_BUFFER_BYTES = 1 << 20
_SMALL_BYTES = 1 << 18


class PeerTimes(NamedTuple):
    """Time limits of hosts that wait for each other. Together they are shorter than the silence after which
    the launcher gives up a host: a host that waits in vain for another one has asked the launcher by then.
    """

    connect_s: float  # for all addresses together
    greeting_s: float
    silent_s: float  # for a peer that sends nothing more, or takes nothing more

    @classmethod
    def within(cls, limit_s: float) -> PeerTimes:
        """Return limits that fit into `limit_s`."""
        part_s = limit_s / 4
        return cls(part_s, min(GREETING_S, part_s), min(SILENT_S, part_s))


class PeerServer:
    """Listens in threads until it is closed."""

    def __init__(self, token: str, contents: SyncContents, times: PeerTimes) -> None:
        """Errors: OSError if it cannot listen"""
        self._times = times
        self._token = token.encode()
        self._contents = contents
        self._server = listen_on_all(0)
        self.port: int = self._server.getsockname()[1]
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._is_closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        self._contents.close()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._server.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                fd, _ = self._server._accept()  # type: ignore[attr-defined] # of the C class; see listener.py
            except OSError:
                if self._is_closed:
                    return
                time.sleep(ACCEPT_AGAIN_S)  # there are too many open files
                continue
            connection = socket.socket(fileno=fd)
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.settimeout(self._times.greeting_s)
            greeting = _read(connection, _TOKEN_BYTES + 4)
            if hmac.compare_digest(greeting[:_TOKEN_BYTES], self._token):
                num_wanted = int.from_bytes(greeting[_TOKEN_BYTES:], "big")
                num_bytes = _DIGEST_BYTES * min(num_wanted, self._contents.num_known)
                wanted = _read(connection, num_bytes)
                connection.settimeout(self._times.silent_s)
                for place in range(0, num_bytes, _DIGEST_BYTES):
                    if not self._send(connection, wanted[place : place + _DIGEST_BYTES]):
                        break
        self._places.release()

    def _send(self, connection: socket.socket, digest: bytes) -> bool:
        silent_s = self._times.silent_s
        fd = self._contents.open(digest, silent_s)
        if fd is None:
            connection.sendall(_NO)
            return False
        try:
            done, size = 0, self._contents.size(digest)
            if size <= _SMALL_BYTES and self._contents.wait_beyond(digest, size - 1, silent_s) == size:
                data = os.pread(fd, size, 0)  # Python's sendfile() takes longer
                if len(data) == size:
                    connection.sendall(_YES + data)
                    return True
            connection.sendall(_YES)
            while done < size:
                there = self._contents.wait_beyond(digest, done, silent_s)
                if there == done or self._is_closed:
                    return False
                num_sent = connection.sendfile(_Piece(fd), done, there - done)
                if not num_sent:  # the content was begun anew, because its peer was lost
                    newer = self._contents.open(digest, silent_s)
                    if newer is None:
                        return False
                    os.close(fd)
                    fd = newer
                    num_sent = connection.sendfile(_Piece(fd), done, there - done)
                if not num_sent:
                    return False
                done += num_sent
        finally:
            os.close(fd)
        return True


class _Piece:
    """An object for `sendfile`: the file of a descriptor, which stays open."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.mode = "rb"

    def fileno(self) -> int:
        return self._fd

    def seek(self, place: int) -> None:
        os.lseek(self._fd, place, os.SEEK_SET)

    def read(self, num_bytes: int) -> bytes:
        return os.read(self._fd, num_bytes)


def pull(
    source: SyncFrom,
    token: str,
    wanted: list[Entry],
    contents: SyncContents,
    *,
    times: PeerTimes,
    is_over: Callable[[], bool],
) -> tuple[int, str]:
    """Take contents from a peer, in this order. Return how many came, and why not all did.

    Errors: OSError of the disk
    """
    try:
        connection = _connect(source, times)
    except OSError as error:
        at = f"{', '.join(source.addresses)}, port {source.port}"
        return 0, f"cannot be reached at {at}: {error.strerror or error}"
    num_done = 0
    with connection:
        asked = b"".join(one.digest for one in wanted)
        try:
            connection.sendall(token.encode() + len(wanted).to_bytes(4, "big") + asked)
        except OSError as error:
            return 0, f"hung up: {error.strerror or error}"
        for entry in wanted:
            why_not = _take(connection, entry, contents, is_over)
            if why_not:
                return num_done, why_not
            num_done += 1
    return num_done, ""


def _take(
    connection: socket.socket, entry: Entry, contents: SyncContents, is_over: Callable[[], bool]
) -> str:
    contents.begin(entry)
    try:
        for piece in _pieces(connection, entry.size):
            if is_over():
                return "is not needed any more"
            contents.write(piece)
    except _PeerError as error:
        return str(error)
    finally:
        contents.give_up_current()
    return "" if contents.end() else "sent something else than was asked for"


class _PeerError(Exception):
    pass


def _pieces(connection: socket.socket, size: int) -> Iterator[memoryview]:
    """Yield the pieces of one content. Errors: _PeerError"""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    try:
        if _read(connection, 1) != _YES:
            raise _PeerError("does not have what it should have")
        while size:
            num_bytes = connection.recv_into(buffer, min(size, _BUFFER_BYTES))
            if not num_bytes:
                raise _PeerError("hung up")
            size -= num_bytes
            yield buffer[:num_bytes]
    except ConnectionError:
        raise _PeerError("hung up") from None
    except OSError as error:
        raise _PeerError(f"is silent: {error.strerror or error}") from None


def _connect(source: SyncFrom, times: PeerTimes) -> socket.socket:
    """Connect to a peer. Errors: OSError of the last address"""
    failure = OSError("it has no address")
    for address in source.addresses:
        limit_s = min(CONNECT_S, times.connect_s / len(source.addresses))
        try:
            connection = socket.create_connection((address, source.port), timeout=limit_s)
        except OSError as error:
            failure = error
        else:
            connection.settimeout(times.silent_s)
            return connection
    raise failure


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    """Read so many bytes. Errors: OSError if the stream ends before"""
    parts = []
    while num_bytes:
        part = connection.recv(min(num_bytes, _BUFFER_BYTES))
        if not part:
            raise ConnectionError("hung up")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
