"""Whether a server answers: asked on its own host, so that no firewall stands between."""

from __future__ import annotations

import errno
import os
import socket

from ...wire.frames import Frame, Healthy
from ..system.background import in_background
from ..system.lean_stdlib import Selector
from ..system.listener import listen_on_all
from ..system.own_addresses import own_addresses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

ASK_EVERY_S = 0.5
TIMEOUT_S = 5.0  # a question at one address takes no longer
LOOPBACKS = ("127.0.0.1", "::1")
_MAX_BYTES = 1 << 16


class HealthWatch:
    """Asks one server again and again until it is healthy. The launcher hears of each new problem, and then
    that the server is healthy.
    """

    def __init__(
        self,
        host: str,
        port: int,
        path: str,
        *,
        rank: int,
        selector: Selector,
        send: Callable[[Frame], None],
    ) -> None:
        """`host` is empty for every address of this host, `path` for a connection alone."""
        self._host, self._port, self._path, self._rank = host, port, path, rank
        self._selector, self._send = selector, send
        self._next_at = 0.0
        self._is_asking = self._is_over = False
        self._said = ""

    def look(self, now: float) -> None:
        """Ask if it is time."""
        if not self._is_asking and not self._is_over and now >= self._next_at:
            self._next_at = now + ASK_EVERY_S
            self._is_asking = True
            in_background(self._selector, self._ask, self._take)

    def end(self) -> None:
        """Ask no more, and keep the answer to oneself that may still come: the server has ended."""
        self._is_over = True

    def _ask(self) -> Frame:
        problem = _NO_ANSWER
        for address in [self._host] if self._host else [*LOOPBACKS, *own_addresses()]:
            why_not = why_not_healthy(address, self._port, self._path)
            if not why_not:
                return Healthy(self._rank, "", self._note(address))
            if problem == _NO_ANSWER or not why_not.startswith("refuses"):
                problem = why_not
        return Healthy(self._rank, problem, "")

    def _note(self, address: str) -> str:
        """Return a note if other hosts cannot reach the server, as it listens on loopback alone."""
        others = [] if self._host or address not in LOOPBACKS else own_addresses()
        if not others or any(not why_not_healthy(one, self._port, "") for one in others):
            return ""
        return (
            f"the server listens at {address} only, where no other host reaches it; have it listen on all "
            "addresses, e.g. with --host 0.0.0.0"
        )

    def _take(self, answer: Frame) -> None:
        self._is_asking = False
        is_known = isinstance(answer, Healthy) and answer.problem != "" and answer.problem == self._said
        if self._is_over or is_known:
            return
        if isinstance(answer, Healthy):
            self._said, self._is_over = answer.problem, not answer.problem
        self._send(answer)


_NO_ANSWER = "no address answers"


def is_taken(host: str, port: int) -> bool:
    """Tell whether another program has the port at which a server is going to be asked; `host` empty: at any
    address of this host. Of another name or a host elsewhere it is not known.
    """
    try:
        if not host:
            listen_on_all(port).close()
            return False
        address = LOOPBACKS[0] if host == "localhost" else host
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        socket.inet_pton(family, address)  # no name: bind() would ask a name server for it
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((address, port))
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def why_not_healthy(address: str, port: int, path: str) -> str:
    """Return why the server does not answer there, or not with a code from 200 to 299; empty if it does."""
    where = f"port {port}"
    try:
        with socket.create_connection((address, port), TIMEOUT_S) as connection:
            if not path:
                return ""
            host = f"[{address}]" if ":" in address else address
            connection.sendall(
                f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()
            )
            data = b""
            while len(data) < _MAX_BYTES:  # the whole answer: some servers complain of one that hangs up
                part = connection.recv(_MAX_BYTES)
                if not part:
                    break
                data += part
    except ConnectionRefusedError:
        return f"refuses connections on {where}"
    except TimeoutError:
        return f"does not answer on {where} within {TIMEOUT_S:g} s"
    except OSError as error:
        return f"cannot be asked on {where}: {os.strerror(error.errno) if error.errno else error}"
    words = data.split(b"\n")[0].split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        return f"answers on {where}, but not as an HTTP server"
    return "" if words[1].startswith(b"2") else f"answers {path} on {where} with {words[1].decode()}"
