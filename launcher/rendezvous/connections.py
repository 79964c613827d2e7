"""The coordinator's connections: sockets and bytes, members and strangers alike; coordinator.py handles their
meaning.

[Note: Strangers]
Any program that reaches the port may connect and send anything. A connection that is not a member yet has
HANDSHAKE_S to become one, at most MAX_STRANGERS are kept (the oldest goes first), frames are short, and a
frame that is not understood closes the connection. None of this ends a member's connection or the job.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable
from typing import Protocol

from ..node.system.listener import listen_on_all
from ..wire.frames import ProtocolError
from .messages import PROTOCOL, News, NewsDecoder, Welcome, encode_news
from .seal import Seal

HANDSHAKE_S = 10.0
MAX_STRANGERS = 128
MAX_OUTBOX_BYTES = 256 << 10
READ_BYTES = 1 << 14
_CLOSE_WITH_RESET = struct.pack("ii", 1, 0)  # so that no connection lingers on the port that rank 0 will take


class Peer:
    """One connection; a member once `node_rank` is set."""

    def __init__(self, sock: socket.socket, *, where: str, is_at_second_door: bool, mark: str) -> None:
        self.sock = sock
        self.where = where
        self.is_at_second_door = is_at_second_door
        self.nonce = mark + secrets.token_hex(16)  # joined with the other side's, once that has come
        self.is_challenged = False
        self.decoder = NewsDecoder()
        self.seal: Seal | None = None  # for frames that are sent
        self.outbox = bytearray()
        self.began_at = self.heard_at = time.monotonic()
        self.is_leaving = False  # no more is sent or read; the other side closes
        self.node_rank: int | None = None
        self.heartbeat_s = float("inf")
        self.is_ready = False


class ConnectionHandler(Protocol):
    """The listener: it gets the events since the last call of `serve`."""

    def hear(self, peer: Peer, news: News) -> None:
        """Take news. Errors: ProtocolError if they must not come from there; it is closed then."""

    def lose(self, peer: Peer, message: str) -> None:
        """Take note that the connection is gone, though neither side announced that."""


class Connections:
    """All connections of one coordinator. One thread uses this; only `serve` waits."""

    def __init__(self, listener: ConnectionHandler) -> None:
        self.peers: list[Peer] = []  # the oldest first
        self.mark = secrets.token_hex(8)  # begins the nonces that are ours
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._doors: dict[bool, socket.socket] = {}  # by "is the second one"

    def open_door(self, port: int, *, is_second: bool = False) -> int:
        """Answer on this port, on all addresses; return the port. Errors: OSError if it cannot be bound."""
        door = socket.socket(fileno=listen_on_all(port).detach())
        door.setblocking(False)
        self._doors[is_second] = door
        self._selector.register(door, selectors.EVENT_READ, is_second)
        number: int = door.getsockname()[1]
        return number

    def close_second_door(self) -> None:
        """Close the second door; connections through it stay."""
        if True in self._doors:
            self._close(self._doors.pop(True))

    def adopt(self, sock: socket.socket, *, where: str, is_at_second_door: bool = False) -> Peer:
        """Take over a connection that was made elsewhere."""
        sock.setblocking(False)
        peer = Peer(sock, where=where, is_at_second_door=is_at_second_door, mark=self.mark)
        self.peers.append(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)
        self.send(peer, Welcome(PROTOCOL, peer.nonce))
        return peer

    def serve(self, timeout_s: float) -> None:
        """Wait for events, deal with them, and close connections that took too long to become members."""
        for key, events in self._selector.select(timeout_s):
            peer = key.data
            if not isinstance(peer, Peer):
                self._accept(is_second=peer)
                continue
            if events & selectors.EVENT_WRITE and peer in self.peers:
                self._flush(peer)
            if events & selectors.EVENT_READ and peer in self.peers:
                self._read(peer)
        now = time.monotonic()
        for peer in [*self.peers]:
            if (peer.node_rank is None or peer.is_leaving) and now - peer.began_at > HANDSHAKE_S:
                self.drop(peer)

    def send(self, peer: Peer, news: News) -> None:
        if peer in self.peers and not peer.is_leaving:
            peer.outbox += encode_news(news, peer.seal)
            self._flush(peer)

    def send_all(self, peers: Iterable[Peer], news: News) -> None:
        for peer in [*peers]:  # a connection that is lost meanwhile leaves the original
            self.send(peer, news)

    def leave(self, peer: Peer) -> None:
        """Send nothing more. The other side closes, so that no sent frame gets lost."""
        if peer in self.peers and not peer.is_leaving:
            peer.is_leaving = True
            peer.began_at = time.monotonic()
            self._flush(peer)

    def drop(self, peer: Peer) -> None:
        """Close at once."""
        if peer in self.peers:
            self.peers.remove(peer)
            self._close(peer.sock)

    def close(self) -> None:
        for key in [*self._selector.get_map().values()]:
            self._close(key.fileobj)  # type: ignore[arg-type] # only sockets are registered
        self._selector.close()

    def _accept(self, *, is_second: bool) -> None:
        strangers = [peer for peer in self.peers if peer.node_rank is None]
        if len(strangers) >= MAX_STRANGERS:
            self.drop(strangers[0])
        try:
            sock, address = self._doors[is_second].accept()
        except OSError:  # gone again, or no file descriptor is free
            if strangers:
                self.drop(strangers[0])
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if is_second:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_WITH_RESET)
        self.adopt(sock, where=str(address[0]).removeprefix("::ffff:"), is_at_second_door=is_second)

    def _read(self, peer: Peer) -> None:
        try:
            data = peer.sock.recv(READ_BYTES)
            if not data:
                raise OSError("the connection ended")
            peer.decoder.add(data)
            for news in peer.decoder.news():
                if peer in self.peers and not peer.is_leaving:
                    peer.heard_at = time.monotonic()
                    self._listener.hear(peer, news)
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._lose(peer, f"what it sent is not our protocol: {error}")
        except OSError as error:
            self._lose(peer, error.strerror or str(error))

    def _flush(self, peer: Peer) -> None:
        try:
            while peer.outbox:
                del peer.outbox[: peer.sock.send(peer.outbox)]
            if peer.is_leaving:
                peer.sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            if len(peer.outbox) > MAX_OUTBOX_BYTES:
                self._lose(peer, "it does not read what it is sent")
                return
        except OSError as error:
            self._lose(peer, error.strerror or str(error))
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
        self._selector.modify(peer.sock, wanted, peer)

    def _lose(self, peer: Peer, message: str) -> None:
        is_new = peer in self.peers and not peer.is_leaving
        self.drop(peer)
        if is_new:
            self._listener.lose(peer, message)

    def _close(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()
