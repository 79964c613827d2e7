"""Copies of this host's snapshots for another host, its partner, sent beside training."""

from __future__ import annotations

import os
import socket
import threading

from ....shared.memory_messages import connect_to, receive_message, send_message
from ..system.lean_stdlib import suppress
from .shelf import CannotHold, Shelf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NamedTuple
else:
    from ...wire.fast_tuple import Record as NamedTuple

SILENT_S = 30.0  # for a peer that takes nothing more, or does not answer
NICENESS = 19
_PIECE_BYTES = 4 << 20


class MemoryPeer(NamedTuple):
    """The memory server of a host."""

    name: str
    addresses: list[str]
    port: int


class CopySender:
    """Sends whole files to one partner, in the order in which they became whole, in a thread of its own."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._changed = threading.Condition()
        self._queue: list[tuple[str, str, str]] = []  # owner, tag and name
        self._is_sending = ""  # the tag of the file that is on its way
        self._problems: dict[str, str] = {}  # why a generation has no copy, by tag
        self._partner: MemoryPeer | None = None
        self._token = ""
        self._connection: socket.socket | None = None  # only the thread closes it
        self._connected_to: MemoryPeer | None = None
        self._is_closed = False
        self._has_thread = False

    def meet(self, partner: MemoryPeer | None, token: str) -> None:
        """Send to this partner from now on; None: to none."""
        with self._changed:
            self._partner, self._token = partner, token
            self._queue.clear()
            self._problems.clear()
            self._interrupt()

    def add(self, owner: str, tag: str, name: str) -> None:
        """Send a file."""
        with self._changed:
            if self._partner is None or self._is_closed:
                return
            self._queue.append((owner, tag, name))
            self._changed.notify_all()
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._run, name="copier", daemon=True).start()

    def wait(self, tag: str) -> str:
        """Wait until the files of a generation are sent; return why one was not."""
        with self._changed:
            while not self._is_closed and (
                self._is_sending == tag or any(one[1] == tag for one in self._queue)
            ):
                self._changed.wait()
            return self._problems.get(tag, "")

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._interrupt()

    def _interrupt(self) -> None:
        """Let the thread, if it sends, stop; a descriptor that it uses must not be closed."""
        connection = self._connection
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._changed.notify_all()

    def _run(self) -> None:
        yield_to_training()
        while True:
            with self._changed:
                while not self._queue and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                owner, tag, name = self._queue.pop(0)
                partner, token, self._is_sending = self._partner, self._token, tag
                is_lost = tag in self._problems
            problem = ""
            if partner is not None and not is_lost:
                problem = self._send(partner, token, owner, tag, name)
            with self._changed:
                self._is_sending = ""
                if problem and partner is self._partner:
                    if len(self._problems) > 16:
                        self._problems.clear()
                    self._problems[tag] = problem
                self._changed.notify_all()

    def _send(self, partner: MemoryPeer, token: str, owner: str, tag: str, name: str) -> str:
        """Send one file; return why that failed."""
        try:
            view = self._shelf.view(owner, tag, name)
        except CannotHold as error:
            return str(error)
        try:
            ask = {"do": "copy", "owner": owner, "tag": tag, "name": name, "size": len(view)}
            connection = self._asked(partner, token, ask)
            _check(connection)
            send_view(connection, view)
            _check(connection)
        except CannotHold as error:
            self._hang_up()
            return f"{partner.name} does not take the copy: {error}"
        except OSError as error:
            self._hang_up()
            return f"{partner.name} cannot take the copy: {error.strerror or error}"
        return ""

    def _asked(self, partner: MemoryPeer, token: str, ask: dict[str, Any]) -> socket.socket:
        """Return a connection on which this was asked. One that was idle may have ended: then a new one.

        Errors: OSError
        """
        if self._connection is not None and self._connected_to == partner:
            try:
                send_message(self._connection, ask)
                if not _has_ended(self._connection):
                    return self._connection
            except OSError:
                pass
        self._hang_up()
        connection = connect_to(partner.addresses, partner.port, token=token, silent_s=SILENT_S)
        self._connection, self._connected_to = connection, partner
        send_message(connection, ask)
        return connection

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _has_ended(connection: socket.socket) -> bool:
    """Tell whether the other side has closed the connection."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _check(connection: socket.socket) -> None:
    """Take an answer. Errors: CannotHold; OSError"""
    answer, _ = receive_message(connection)
    if answer.get("problem"):
        raise CannotHold(str(answer["problem"]))


def send_view(connection: socket.socket, view: memoryview) -> None:
    """Send bytes from where they lie: on a machine's own network sendfile() takes thrice as long.

    Errors: OSError
    """
    for place in range(0, len(view), _PIECE_BYTES):  # the time limit is for each piece
        connection.sendall(view[place : place + _PIECE_BYTES])


def yield_to_training() -> None:
    """Let this thread have the processor when training does not want it."""
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, max(niceness, NICENESS))
