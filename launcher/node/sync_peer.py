"""Contents from host to host. Sent to the nodes: standard library only.

Who knows the token of this job may ask for contents by their digests. They are sent as they are, in clear;
who gets them compares the digests.
"""

from __future__ import annotations

import hmac
import os
import socket
import threading

from .lean_stdlib import suppress
from .listener import listen_on_all
from .sync_contents import Contents

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..wire.manifest import Entry

MAX_CONNECTIONS = 64
GREETING_WITHIN_S = 10.0
SILENT_S = 30.0  # of a peer that has nothing more to give, or takes nothing more
CONNECT_WITHIN_S = 5.0
_TOKEN_BYTES = 32
_DIGEST_BYTES = 20
_YES, _NO = b"\1", b"\0"
_BUFFER_BYTES = 1 << 20
_SMALL_BYTES = 1 << 18


class PeerServer:
    """Listens in threads until it is closed."""

    def __init__(self, token: str, contents: Contents) -> None:
        """Errors: OSError if it cannot listen"""
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
                fd, _ = self._server._accept()  # type: ignore[attr-defined] # of the C module; see listener.py
            except OSError:
                if self._is_closed:
                    return
                continue
            connection = socket.socket(fileno=fd)
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.settimeout(GREETING_WITHIN_S)
            greeting = _read(connection, _TOKEN_BYTES + 4)
            if hmac.compare_digest(greeting[:_TOKEN_BYTES], self._token):
                num_wanted = int.from_bytes(greeting[_TOKEN_BYTES:], "big")
                num_bytes = _DIGEST_BYTES * min(num_wanted, self._contents.num_known)
                wanted = _read(connection, num_bytes)
                connection.settimeout(SILENT_S)
                for place in range(0, num_bytes, _DIGEST_BYTES):
                    if not self._send(connection, wanted[place : place + _DIGEST_BYTES]):
                        break
        self._places.release()

    def _send(self, connection: socket.socket, digest: bytes) -> bool:
        fd = self._contents.open(digest, SILENT_S)
        if fd is None:
            connection.sendall(_NO)
            return False
        try:
            done, size = 0, self._contents.size(digest)
            if size <= _SMALL_BYTES and self._contents.wait_beyond(digest, size - 1, SILENT_S) == size:
                connection.sendall(_YES + os.pread(fd, size, 0))  # sendfile() of Python takes longer
                return True
            connection.sendall(_YES)
            while done < size:
                there = self._contents.wait_beyond(digest, done, SILENT_S)
                if there == done or self._is_closed:
                    return False
                while done < there:
                    done += connection.sendfile(_Piece(fd), done, there - done)
        finally:
            os.close(fd)
        return True


class _Piece:
    """What `sendfile` takes: the file of a descriptor, which stays open."""

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
    addresses: list[str],
    port: int,
    token: str,
    wanted: list[Entry],
    contents: Contents,
    is_over: Callable[[], bool],
) -> tuple[int, str]:
    """Take contents from a peer, in this order. Returns how many came, and why not all did.

    Errors: OSError of the disk
    """
    try:
        connection = _connect(addresses, port)
    except OSError as error:
        return 0, f"cannot be reached at {', '.join(addresses)}, port {port}: {error.strerror or error}"
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


def _take(connection: socket.socket, entry: Entry, contents: Contents, is_over: Callable[[], bool]) -> str:
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
    """Errors: _PeerError"""
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


def _connect(addresses: list[str], port: int) -> socket.socket:
    """Errors: OSError of the last address"""
    failure = OSError("it has no address")
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=CONNECT_WITHIN_S)
        except OSError as error:
            failure = error
        else:
            connection.settimeout(SILENT_S)
            return connection
    raise failure


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    """Errors: OSError if it ends before"""
    parts = []
    while num_bytes:
        part = connection.recv(min(num_bytes, _BUFFER_BYTES))
        if not part:
            raise ConnectionError("hung up")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
