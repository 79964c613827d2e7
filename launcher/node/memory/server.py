"""The server of snapshots in an agent: for the workers of its host over a Unix socket, and for other hosts
over the network, where a connection begins with the job's token.
"""

from __future__ import annotations

import hmac
import os
import socket
import threading
import time

from ....shared.memory_messages import (
    TOKEN_BYTES,
    receive_bytes,
    receive_into,
    receive_message,
    send_message,
)
from ..system.lean_stdlib import suppress
from ..system.listener import listen_on_all
from .copier import SILENT_S, CopySender, MemoryPeer, send_view, yield_to_training
from .room import free_bytes
from .shelf import CannotHold, Shelf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

MAX_CONNECTIONS = 1024
MAX_PUT_BYTES = 1 << 30
GREETING_S = 10.0
IDLE_S = 600.0  # for a connection on which nothing is asked
ACCEPT_AGAIN_S = 0.1


class MemoryServer:
    """Listens in threads until it is closed. It holds nothing before the first worker writes."""

    def __init__(self, free: Callable[[], int | None] = free_bytes) -> None:
        """Errors: OSError if it cannot listen"""
        self._free = free
        self._shelf = Shelf(free)
        self._copier = CopySender(self._shelf)
        self._name = ""  # the name of this host in the job
        self._token = ""  # empty: no host is known, and none is served
        self._peers: list[MemoryPeer] = []
        self._partner = ""
        self._is_closed = False
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._local: socket.socket | None = None
        self._network = listen_on_all(0)
        self.port: int = self._network.getsockname()[1]
        self._accept(self._network, self._serve_host)

    def listen(self, path: str) -> None:
        """Serve the workers of this host at a new path. Errors: OSError"""
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # a path may be longer than an address can be; that of its folder's descriptor is not
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            folder = os.open(os.path.dirname(path), flags | os.O_NOFOLLOW)
            try:
                local.bind(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
            finally:
                os.close(folder)
            local.listen(MAX_CONNECTIONS)
        except OSError:
            local.close()
            raise
        before, self._local = self._local, local
        if before is not None:
            _end(before)
        self._accept(local, self._serve_worker)

    def meet(self, name: str, peers: list[MemoryPeer], partner: str, token: str) -> None:
        """Take the hosts of an attempt: this one's name, all of them, and which one gets copies; empty:
        none does.
        """
        self._name, self._peers, self._partner, self._token = name, peers, partner, token
        self._copier.meet(next((one for one in peers if one.name == partner), None), token)

    def close(self) -> None:
        self._is_closed = True
        self._copier.close()
        for one in (self._network, self._local):
            if one is not None:
                _end(one)
        self._shelf.close()

    # Connections.

    def _accept(self, server: Any, serve: Callable[[socket.socket], None]) -> None:
        def run() -> None:
            while not self._is_closed:
                try:
                    fd, _ = server._accept()  # the C class has it; see listener.py
                except OSError:
                    if self._is_closed or server.fileno() == -1 or server is not self._listening(server):
                        return
                    time.sleep(ACCEPT_AGAIN_S)  # there are too many open files
                    continue
                connection = socket.socket(fileno=fd)
                if self._places.acquire(blocking=False):
                    threading.Thread(target=self._serve, args=(connection, serve), daemon=True).start()
                else:
                    connection.close()

        threading.Thread(target=run, daemon=True).start()

    def _listening(self, server: Any) -> Any:
        return self._network if server is self._network else self._local

    def _serve(self, connection: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        try:
            with suppress(OSError), connection:
                serve(connection)
        finally:
            self._places.release()

    def _serve_worker(self, connection: socket.socket) -> None:
        acts: dict[str, Callable[[socket.socket, dict[str, Any]], None]] = {
            "hosts": self._hosts,
            "begin": self._begin,
            "create": self._create,
            "finish": self._finish,
            "put": self._put,
            "copied": self._copied,
            "keep": self._keep,
            "drop": self._drop,
            "list": self._list,
            "open": self._open,
        }
        self._answer(connection, acts)

    def _serve_host(self, connection: socket.socket) -> None:
        connection.settimeout(GREETING_S)
        token = bytes(receive_bytes(connection, TOKEN_BYTES))
        if not self._token or not hmac.compare_digest(token, self._token.encode("ascii")):
            return
        yield_to_training()
        self._answer(connection, {"list": self._list, "read": self._read, "copy": self._copy})

    def _answer(
        self, connection: socket.socket, acts: Mapping[str, Callable[[socket.socket, dict[str, Any]], None]]
    ) -> None:
        is_local = connection.family == socket.AF_UNIX
        while not self._is_closed:
            connection.settimeout(None if is_local else IDLE_S)
            asked, descriptor = receive_message(connection)
            if descriptor is not None:
                os.close(descriptor)
            connection.settimeout(None if is_local else SILENT_S)
            act = acts.get(str(asked.get("do")))
            try:
                if act is None:
                    raise CannotHold(f"{str(asked.get('do'))[:40]!r} is none of {', '.join(acts)}")
                act(connection, asked)
            except CannotHold as error:
                send_message(connection, {"problem": str(error)})
            except OSError as error:
                if error.errno is None or isinstance(error, ConnectionError):
                    raise  # the connection is broken
                send_message(connection, {"problem": error.strerror or str(error)})

    # What workers ask.

    def _hosts(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        answer = {
            "name": self._name,
            "partner": self._partner,
            "peers": [list(one) for one in self._peers],
            "token": self._token,
            "free": self._free(),
            "held": self._shelf.held_bytes(),
        }
        send_message(connection, answer)

    def _begin(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        self._shelf.begin(_text(asked, "tag"))
        send_message(connection, {})

    def _create(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        tag, name, capacity = _text(asked, "tag"), _text(asked, "name"), _count(asked, "capacity")
        held = self._shelf.create(self._name, tag, name, capacity)
        send_message(connection, {}, descriptor=held.descriptor)

    def _finish(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        tag, name = _text(asked, "tag"), _text(asked, "name")
        self._shelf.finish(self._name, tag, name, _count(asked, "size"))
        self._copier.add(self._name, tag, name)
        send_message(connection, {})

    def _put(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        tag, name, size = _text(asked, "tag"), _text(asked, "name"), _count(asked, "size")
        if size > MAX_PUT_BYTES:
            raise ConnectionError(f"{name} has {size} bytes, more than can be put at once")
        data = bytes(receive_bytes(connection, size))
        self._shelf.put(self._name, tag, name, data)
        self._copier.add(self._name, tag, name)
        send_message(connection, {})

    def _copied(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        why_not = self._copier.wait(_text(asked, "tag"))
        send_message(connection, {"why_not": why_not})

    def _keep(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        self._shelf.keep(_text(asked, "tag"))
        send_message(connection, {})

    def _drop(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        self._shelf.drop(_text(asked, "tag"))
        send_message(connection, {})

    def _open(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        descriptor, size = self._shelf.open(*(_text(asked, one) for one in ("owner", "tag", "name")))
        try:
            send_message(connection, {"size": size}, descriptor=descriptor)
        finally:
            os.close(descriptor)

    # What workers and other hosts ask.

    def _list(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        send_message(connection, {"held": [list(one) for one in self._shelf.held()]})

    def _read(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        """Send a part of a file."""
        view = self._shelf.view(*(_text(asked, one) for one in ("owner", "tag", "name")))
        offset = _count(asked, "offset")
        part = view[offset : offset + _count(asked, "size")]
        send_message(connection, {"size": len(part)})
        with _of_stream():
            send_view(connection, part)

    def _copy(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        """Take a copy of another host's file."""
        owner, tag, name = (_text(asked, one) for one in ("owner", "tag", "name"))
        size = _count(asked, "size")
        held = self._shelf.create(owner, tag, name, size)
        is_whole = False
        try:
            send_message(connection, {})
            with _of_stream():
                receive_into(connection, held.view())
            self._shelf.finish(owner, tag, name, size)
            is_whole = True
        finally:
            if not is_whole:
                self._shelf.give_up(owner, tag, name)
        send_message(connection, {})


class _of_stream:
    """Turns an error in the middle of a file's bytes into one that ends the connection."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise ConnectionError(str(error)) from error


def _text(asked: dict[str, Any], name: str) -> str:
    value = asked.get(name)
    if not isinstance(value, str):
        raise CannotHold(f"{name} is {value!r:.80}; it must be text")
    return value


def _count(asked: dict[str, Any], name: str) -> int:
    value = asked.get(name)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise CannotHold(f"{name} is {value!r:.80}; it must be a number of bytes")
    return value


def _end(server: Any) -> None:
    with suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    server.close()
