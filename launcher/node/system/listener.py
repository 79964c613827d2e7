"""The host that the others try to reach: it listens on all its addresses."""

from __future__ import annotations

import _socket  # socket is made of it, and takes 10 ms more
import errno
import os
import sys

from .lean_stdlib import suppress

MAX_OPEN = 4096  # connections that are held; a job needs fewer, so more are of strangers
MAX_WAITING = 1024  # connections that are not accepted yet
# struct linger, on for 0 s: no connection lingers on the port that rank 0 will take
_CLOSE_WITH_RESET = (1).to_bytes(4, sys.byteorder) + bytes(4)


class PortListener:
    """Answers every connection to a port, on all addresses of this host, with the token."""

    def __init__(self, port: int, token: str) -> None:
        """Errors: OSError, EADDRINUSE if the port is taken."""
        self._token = token.encode()
        self._server = listen_on_all(port)
        self._server.setblocking(False)
        self._open: list[_socket.socket] = []

    @property
    def port(self) -> int:
        """Return the port: the one that was asked for, or for 0 the kernel's choice."""
        port: int = self._server.getsockname()[1]
        return port

    def fileno(self) -> int:
        return self._server.fileno()

    def accept(self) -> None:
        """Answer each connection. The other side closes it, or we do at the end."""
        with suppress(OSError):
            connection = self._next()
            connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_LINGER, _CLOSE_WITH_RESET)
            connection.setblocking(False)
            self._open.append(connection)
            connection.send(self._token)
        while len(self._open) > MAX_OPEN:
            self._open.pop(0).close()

    def _next(self) -> _socket.socket:
        """Accept a connection. Errors: OSError; without a free file the oldest is closed."""
        try:
            return _socket.socket(fileno=self._server._accept()[0])  # type: ignore[attr-defined] # stubs
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._open:
                self._open.pop(0).close()
            raise

    def close(self) -> None:
        for one in (self._server, *self._open):
            one.close()


def listen_on_all(port: int) -> _socket.socket:
    """Return a listening socket on every address of this host, IPv4 and IPv6; port 0 means any.

    Errors: OSError, EADDRINUSE if the port is taken.
    """
    server, everywhere = _dual_stack(), "::"
    if server is None:
        server, everywhere = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM), "0.0.0.0"
    try:
        server.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        server.bind((everywhere, port))
        server.listen(MAX_WAITING)
    except OSError:
        server.close()
        raise
    return server


def _dual_stack() -> _socket.socket | None:
    """Return a socket for both kinds of addresses; None on a host without IPv6."""
    try:
        server = _socket.socket(_socket.AF_INET6, _socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        server.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
    except OSError:
        server.close()
        return None
    return server


def why_not_listening(port: int, error: OSError) -> str:
    """Return one sentence for a port that cannot be listened on."""
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use"
    return f"port {port} cannot be used: {os.strerror(error.errno or 0)}"
