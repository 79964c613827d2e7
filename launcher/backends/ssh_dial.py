"""TCP connections to sshd; those to the first hosts are begun early.

A host's sshd starts a process for a connection, reads its keys and says hello: 10 ms of another CPU. The
modules that a job over SSH has yet to load, paramiko most of all, take us as long as that for several hosts,
so they are loaded after the connections are begun. No byte is sent before the modules are loaded, and an
unreachable host is reported in its own turn.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from ..errors import EXIT_HOST, LaunchError
from .ssh_config import Target

# This option of a socket exists on Linux only, and lasts until data are received.
_QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)
NEXT_AFTER_S = 0.25  # from one address of a host to the next, as most programs do
Address = tuple[Any, ...]
# Wait so long for the connections to begin; a name that DNS must look up may take longer
HEAD_START_S = 0.02


class PromptSocket(socket.socket):
    """Acknowledges received bytes at once, where the system lets it.

    sshd sends each of its first small packets only after the one before was acknowledged (Nagle's
    algorithm), and the kernel would delay that by 40 ms.
    """

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = super().recv(size, flags)
        if _QUICKACK is not None:
            with contextlib.suppress(OSError):  # the socket was closed meanwhile
                self.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
        return data


class Dial:
    """One connection that is being made, to the address of the host that answers first.

    The next address is tried when one has failed, or has not answered for NEXT_AFTER_S;
    those before it go on meanwhile.

    Source: RFC 8305, "Happy Eyeballs"
    """

    def __init__(self, hop: Target) -> None:
        """Find the addresses.

        Errors: OSError if the name is not known; UnicodeError if the text cannot be a name
        """
        self._timeout_s = hop.connect_timeout_s
        # Pass bytes, because a `str` would be encoded as an international name, which needs modules that
        # take 5 ms to load.
        name = hop.address.encode() if hop.address.isascii() else hop.address
        found = socket.getaddrinfo(name, hop.port, hop.family, socket.SOCK_STREAM)
        self._addresses = _alternating([(family, address) for family, _, _, _, address in found])
        self._sockets: list[PromptSocket] = []  # those that are connecting
        self._error: OSError | None = None  # the last failure
        self._give_up_at = 0.0
        self._next_at = 0.0

    def begin(self) -> None:
        """Begin to connect to the first address; do not wait."""
        self._give_up_at = time.monotonic() + self._timeout_s
        self._begin_next()

    def finish(self) -> socket.socket:
        """Wait for the connection.

        Errors: OSError of the last address that failed; TimeoutError if none answered
        """
        if not self._give_up_at:
            self.begin()
        try:
            while True:
                now = time.monotonic()
                if self._addresses and (not self._sockets or now >= self._next_at):
                    self._begin_next()
                elif not self._sockets:
                    raise self._error or TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
                else:
                    until = min(self._give_up_at, self._next_at) if self._addresses else self._give_up_at
                    # Look once even if the time is over: this process may have been stopped or busy while
                    # the host answered.
                    connected = self._wait(until - now)
                    if connected is not None:
                        return connected
                    if self._sockets and now >= self._give_up_at:
                        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        finally:
            self.close()

    def close(self) -> None:
        """Give up connections that are not finished."""
        for one in self._sockets:
            one.close()
        self._sockets.clear()

    def _begin_next(self) -> None:
        family, address = self._addresses.pop(0)
        self._next_at = time.monotonic() + NEXT_AFTER_S
        try:
            sock = PromptSocket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            self._sockets.append(sock)
            error = sock.connect_ex(address)
            if error not in (0, errno.EINPROGRESS):
                self._fail(sock, error)
        except OSError as failure:  # this machine may know no such addresses, or have no socket left
            self._error = failure

    def _wait(self, timeout_s: float) -> socket.socket | None:
        """Return the first socket that is connected within this time; None if there is none."""
        poll = select.poll()
        for one in self._sockets:
            poll.register(one, select.POLLOUT)
        ready = {fd for fd, _ in poll.poll(max(0.0, timeout_s) * 1e3)}
        for sock in [one for one in self._sockets if one.fileno() in ready]:
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._fail(sock, error)
                continue
            self._sockets.remove(sock)
            sock.settimeout(self._timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        return None

    def _fail(self, sock: PromptSocket, error: int) -> None:
        self._sockets.remove(sock)
        sock.close()
        self._error = OSError(error, os.strerror(error))


def _alternating(found: list[tuple[int, Address]]) -> list[tuple[int, Address]]:
    """Alternate IPv4 and IPv6 addresses, so that neither kind waits for all of the other; the first address
    stays first.
    """
    first = [one for one in found if one[0] == found[0][0]]
    others = [one for one in found if one[0] != found[0][0]]
    pairs = itertools.zip_longest(first, others)
    return [one for pair in pairs for one in pair if one is not None]


class EarlyDials:
    """Connections that are begun before they are asked for. Any thread may call."""

    def __init__(self, targets: Mapping[int, Target]) -> None:
        """Begin the connections, `targets` by node_rank; hosts reached through another host, a command or an
        ssh are left out.
        """
        self._targets = {
            rank: target
            for rank, target in targets.items()
            if not target.jumps and target.proxy_command is None and not target.openssh.only
        }
        self._begun: dict[int, Dial] = {}
        self._lock = threading.Lock()
        thread = threading.Thread(target=self._begin_all, name="early dials", daemon=True)
        thread.start()
        # The other thread is there because DNS may be slow. This one waits a moment for it: a thread hardly
        # runs beside one that imports.
        thread.join(HEAD_START_S)

    def take(self, node_rank: int) -> Dial | None:
        """Return the connection to this host, which then belongs to the caller; None if it was not begun."""
        with self._lock:
            self._targets.pop(node_rank, None)
            return self._begun.pop(node_rank, None)

    def close(self) -> None:
        """Give up connections that were not taken."""
        with self._lock:
            self._targets.clear()
            for one in self._begun.values():
                one.close()
            self._begun.clear()

    def _begin_all(self) -> None:
        for node_rank, target in tuple(self._targets.items()):
            # A caller that needs a host that failed here tries again, and reports the reason.
            with contextlib.suppress(OSError, UnicodeError):
                dial = Dial(target)
                with self._lock:
                    if node_rank in self._targets:
                        dial.begin()
                        self._begun[node_rank] = dial


def dial(hop: Target, begun: Dial | None = None) -> socket.socket:
    """Return a TCP connection to the host, the one that was `begun` if there is one.

    Errors: LaunchError with what to do about it
    """
    where = f"{hop.address} port {hop.port}"
    try:
        return (begun or Dial(hop)).finish()
    except (socket.gaierror, UnicodeError):  # UnicodeError: a text that is no name, such as two dots in a row
        raise _host_error(
            f"the name {hop.address} is not known; correct the hostfile, DNS or /etc/hosts"
        ) from None
    except ConnectionRefusedError:
        raise _host_error(f"{where} refused the connection; is sshd running there, on this port?") from None
    except TimeoutError:
        raise _host_error(
            f"{where} did not answer within {hop.connect_timeout_s:g} s; is the host up and "
            "not behind a firewall?"
        ) from None
    except OSError as error:
        raise _host_error(f"cannot reach {where}: {error.strerror or error}") from None


def _host_error(message: str) -> LaunchError:
    return LaunchError(message, exit_code=EXIT_HOST)
