"""A worker's connections to the memory servers of agents: that of its own host, and those of others."""

from __future__ import annotations

import io
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ....shared.memory_messages import MessageError, connect_to, receive_into, receive_message, send_message

_SILENT_S = 60.0  # patience with another host


class MemoryAddress(NamedTuple):
    """The memory server of a host."""

    name: str
    addresses: tuple[str, ...]
    port: int


class StoredFile(NamedTuple):
    """A file that a server holds, and the host that it comes from."""

    tag: str
    owner: str
    name: str
    size: int


class Surroundings(NamedTuple):
    """This host's place among the hosts, and its memory in bytes."""

    name: str
    partner: str  # the host that has copies; empty: none has
    hosts: tuple[MemoryAddress, ...]
    token: str
    free: int | None  # None: not known
    held: int


class AgentMemory:
    """The server of this host. Any thread may call.

    Errors: OSError, with the server's reason
    """

    def __init__(self, path: str) -> None:
        """`path` is that of the server's socket."""
        self._path = path
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def ask(self, **message: Any) -> dict[str, Any]:
        """Return the answer to a message."""
        with self._lock:
            return self._ask(message)[0]

    def put(self, tag: str, name: str, data: bytes) -> None:
        """Write a small file."""
        with self._lock:
            self._ask({"do": "put", "tag": tag, "name": name, "size": len(data)}, data)

    def descriptor(self, **message: Any) -> tuple[int, dict[str, Any]]:
        """Return a descriptor, for the caller to close, and the answer that it came with."""
        with self._lock:
            answer, descriptor = self._ask(message)
        if descriptor is None:
            raise OSError(f"the memory server at {self._path} sent no file")
        return descriptor, answer

    def copied(self, tag: str) -> str:
        """Wait until the partner has copies of this host's files; return why it has none. Other calls go on
        meanwhile.
        """
        connection = _connect_local(self._path)
        with connection:
            send_message(connection, {"do": "copied", "tag": tag})
            return str(_checked(receive_message(connection)[0]).get("why_not", ""))

    def surroundings(self) -> Surroundings:
        """Return what the server knows of the hosts."""
        found = self.ask(do="hosts")
        hosts = (
            MemoryAddress(str(name), tuple(addresses), int(port)) for name, addresses, port in found["peers"]
        )
        free = found["free"]
        return Surroundings(
            name=found["name"],
            partner=found["partner"],
            hosts=tuple(hosts),
            token=found["token"],
            free=free if free is None else int(free),
            held=int(found["held"]),
        )

    def held(self) -> list[StoredFile]:
        """Return the files that this host holds."""
        return [StoredFile(*one) for one in self.ask(do="list")["held"]]

    def _ask(self, message: dict[str, Any], data: bytes | None = None) -> tuple[dict[str, Any], int | None]:
        connection = self._connection
        if connection is None:
            connection = self._connection = _connect_local(self._path)
        try:
            send_message(connection, message)
            if data is not None:
                connection.sendall(data)
            answer, descriptor = receive_message(connection)
        except OSError:
            self._connection = None
            connection.close()
            raise
        return _checked(answer), descriptor

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()


def held_elsewhere(host: MemoryAddress, token: str) -> list[StoredFile]:
    """Return the files that another host holds. Errors: OSError"""
    with _connected(host, token) as connection:
        send_message(connection, {"do": "list"})
        return [StoredFile(*one) for one in _checked(receive_message(connection)[0])["held"]]


class _PlacedFile(io.RawIOBase):
    """A file of a known size that is read from places in it."""

    def __init__(self, size: int) -> None:
        self._size, self._place = size, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        self._place = start + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or a part of it at the end of the file."""
        view = memoryview(buffer)[: max(0, self._size - self._place)]
        count = self._read_at(self._place, view) if len(view) else 0
        self._place += count
        return count

    def readall(self) -> bytes:
        """Return the rest of the file, by one request."""
        data = bytearray(max(0, self._size - self._place))
        view, done = memoryview(data), 0
        while done < len(view):
            count = self.readinto(view[done:])
            if not count:
                raise MessageError("the file is shorter than it was")
            done += count
        return bytes(data)

    def _read_at(self, place: int, view: memoryview) -> int:
        raise NotImplementedError


class LocalFile(_PlacedFile):
    """A file that this host holds. Its position is its own, though the descriptor is others' as well."""

    def __init__(self, descriptor: int, size: int) -> None:
        super().__init__(size)
        self._descriptor = descriptor

    def _read_at(self, place: int, view: memoryview) -> int:
        return os.preadv(self._descriptor, [view], place)

    def close(self) -> None:
        """Close the descriptor."""
        if not self.closed:
            os.close(self._descriptor)
        super().close()


class RemoteFile(_PlacedFile):
    """A file that another host holds."""

    def __init__(self, host: MemoryAddress, token: str, held: StoredFile) -> None:
        """Errors: OSError"""
        super().__init__(held.size)
        self._held = held
        self._connection = _connect(host, token)

    def _read_at(self, place: int, view: memoryview) -> int:
        held = self._held
        ask = {"do": "read", "owner": held.owner, "tag": held.tag, "name": held.name}
        send_message(self._connection, {**ask, "offset": place, "size": len(view)})
        count = int(_checked(receive_message(self._connection)[0])["size"])
        if count > len(view):
            raise MessageError("more than was asked for")
        receive_into(self._connection, view[:count])
        return count

    def close(self) -> None:
        """Hang up."""
        if not self.closed:
            self._connection.close()
        super().close()


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if answer.get("problem"):
        raise OSError(str(answer["problem"]))
    return answer


def _connect_local(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # a path may be longer than an address can be; that of its folder's descriptor is not
        folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
        finally:
            os.close(folder)
    except OSError:
        connection.close()
        raise
    return connection


@contextmanager
def _connected(host: MemoryAddress, token: str) -> Iterator[socket.socket]:
    with _connect(host, token) as connection:
        yield connection


def _connect(host: MemoryAddress, token: str) -> socket.socket:
    """Connect to another host. Errors: OSError with its name"""
    try:
        return connect_to(host.addresses, host.port, token=token, silent_s=_SILENT_S)
    except OSError as error:
        raise OSError(f"{host.name} cannot be reached: {error.strerror or error}") from None
