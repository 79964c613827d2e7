"""One node's connection to the coordinator: news out, news in, and a bell that ends a wait.

It has no thread of its own.
"""

from __future__ import annotations

import select
import socket
import time

from ..wire.frames import ProtocolError
from .messages import News, NewsDecoder, encode_news
from .seal import Seal

ATTEMPT_S = 2.0  # for one connection, or one write
READ_BYTES = 1 << 14
TICK_S = 0.1


class NewsLine:
    """At most one connection at a time. One thread uses this; `wake` may be called from any.

    Errors: OSError where the connection fails or ended; ProtocolError if the bytes are not our protocol
    """

    def __init__(self) -> None:
        self.heard_at = 0.0  # when the connection began or news came last
        self._sock: socket.socket | None = None
        self._decoder = NewsDecoder()
        self._seal: Seal | None = None  # for frames that are sent
        self._wake_read, self._wake_write = socket.socketpair()

    def connect(self, address: str, port: int) -> None:
        sock = socket.create_connection((address, port), timeout=ATTEMPT_S)
        self.adopt(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def adopt(self, sock: socket.socket) -> None:
        """Use a connection that was made elsewhere."""
        self._sock, self.heard_at = sock, time.monotonic()

    def hang_up(self) -> None:
        """End the connection, if there is one; another may follow."""
        if self._sock is not None:
            self._sock.close()
        self._sock, self._decoder, self._seal = None, NewsDecoder(), None

    def seal(self, *, sent: Seal, received: Seal) -> None:
        """Give each frame its code from now on, also frames that have come and are not taken yet."""
        self._seal, self._decoder.seal = sent, received

    def close(self) -> None:
        """Close for good, once no thread uses it any more."""
        self.hang_up()
        self._wake_read.close()
        self._wake_write.close()

    def wake(self) -> None:
        """End the present wait, or the next one."""
        self._wake_write.send(b".")

    def sleep(self, timeout_s: float) -> None:
        if select.select([self._wake_read], [], [], timeout_s)[0]:
            self._wake_read.recv(READ_BYTES)

    def send(self, news: News) -> None:
        if self._sock is None:
            raise AssertionError("nothing can be sent before there is a connection")
        self._sock.settimeout(ATTEMPT_S)
        self._sock.sendall(encode_news(news, self._seal))

    def next(self, timeout_s: float) -> News:
        """Return the next news. Errors: ProtocolError also if none comes within this time"""
        deadline = time.monotonic() + timeout_s
        while (news := next(self._decoder.news(), None)) is None:
            if time.monotonic() > deadline:
                raise ProtocolError("it does not answer as a coordinator does")
            self._read(TICK_S)
        return news

    def take(self) -> list[News]:
        """Return the news that are there after a short wait."""
        self._read(TICK_S)
        return [*self._decoder.news()]

    def _read(self, timeout_s: float) -> None:
        """Wait for bytes, or until this side has a frame to send."""
        if self._sock is None:
            raise AssertionError("nothing can be read before there is a connection")
        readable, _, _ = select.select([self._sock, self._wake_read], [], [], timeout_s)
        if self._wake_read in readable:
            self._wake_read.recv(READ_BYTES)
        if self._sock in readable:
            data = self._sock.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError("closed by the other side")
            self.heard_at = time.monotonic() if self._decoder.add(data) else self.heard_at
