"""TCP connections to sshd, of which the first are begun early.

A host's sshd starts a process for a connection, reads its keys and says hello: 10 ms of a CPU that is not ours. What a
job over SSH has yet to load, paramiko most of all, takes us as long as that for several hosts, so it is loaded after the
connections are begun. No byte is sent before that, and a host that cannot be reached is told of in its own turn.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Mapping

from .errors import EXIT_HOST, LaunchError
from .ssh_config import Target

_QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)  # of Linux; holds until something is received
HEAD_START_S = 0.02  # what is waited for the connections to be begun: names that DNS knows may take longer


class PromptSocket(socket.socket):
    """Says at once that it has received something, where the system lets it.

    sshd's first small packets each wait for that (Nagle's algorithm), and the kernel would take 40 ms for it.
    """

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = super().recv(size, flags)
        if _QUICKACK is not None:
            with contextlib.suppress(OSError):  # closed meanwhile
                self.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
        return data


class Dial:
    """One connection that is being made: to the first address of the host, and to the next when that fails."""

    def __init__(self, hop: Target) -> None:
        """Find the addresses.

        Errors: OSError if nobody knows the name; UnicodeError if it is none
        """
        self._timeout_s = hop.connect_timeout_s
        # Bytes, because a `str` is encoded as an international name, and what that needs takes 5 ms to load.
        name = hop.address.encode() if hop.address.isascii() else hop.address
        self._addresses = socket.getaddrinfo(name, hop.port, type=socket.SOCK_STREAM)
        self._socket: PromptSocket | None = None
        self._error = 0  # of a connection that failed at once
        self._give_up_at = 0.0

    def begin(self) -> None:
        """Begin to connect to the next address; does not wait.

        Errors: OSError if there can be no socket
        """
        family, kind, protocol, _, address = self._addresses.pop(0)
        self._socket = PromptSocket(family, kind, protocol)
        self._socket.setblocking(False)
        self._error = self._socket.connect_ex(address)
        self._give_up_at = time.monotonic() + self._timeout_s

    def finish(self) -> socket.socket:
        """Wait for the connection.

        Errors: OSError with what the last address said; TimeoutError if it said nothing
        """
        while True:
            try:
                if self._socket is None:
                    self.begin()
                return self._connected()
            except OSError:
                self.close()
                if not self._addresses:
                    raise

    def close(self) -> None:
        """Give it up, unless it is finished."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self) -> socket.socket:
        sock = self._socket
        if sock is None:
            raise AssertionError("a connection that was not begun cannot be waited for")
        if self._error in (0, errno.EINPROGRESS):
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            if not poll.poll(max(0.0, self._give_up_at - time.monotonic()) * 1e3):
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            self._error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if self._error:
            raise OSError(self._error, os.strerror(self._error))
        sock.settimeout(self._timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = None
        return sock


class EarlyDials:
    """Connections that are begun before anybody asks for them. Any thread may call."""

    def __init__(self, targets: Mapping[int, Target]) -> None:
        """By node_rank; those that are reached through another host or a command are left out."""
        self._targets = {
            rank: target
            for rank, target in targets.items()
            if not target.jumps and target.proxy_command is None
        }
        self._begun: dict[int, Dial] = {}
        self._lock = threading.Lock()
        thread = threading.Thread(target=self._begin_all, name="early dials", daemon=True)
        thread.start()
        # Not in this thread, because of slow DNS; and waited for, because a thread beside one that imports hardly runs.
        thread.join(HEAD_START_S)

    def take(self, node_rank: int) -> Dial | None:
        """The connection to this host, which belongs to the caller then; None if it was not begun, and will not be."""
        with self._lock:
            self._targets.pop(node_rank, None)
            return self._begun.pop(node_rank, None)

    def close(self) -> None:
        """Give up what nobody took."""
        with self._lock:
            self._targets.clear()
            for one in self._begun.values():
                one.close()
            self._begun.clear()

    def _begin_all(self) -> None:
        for node_rank, target in tuple(self._targets.items()):
            # Whoever needs a host that failed here tries again, and says why it cannot be.
            with contextlib.suppress(OSError, UnicodeError):
                dial = Dial(target)
                with self._lock:
                    if node_rank in self._targets:
                        dial.begin()
                        self._begun[node_rank] = dial


def dial(hop: Target, begun: Dial | None = None) -> socket.socket:
    """A TCP connection to the host, the one that was `begun` if there is one.

    Errors: LaunchError with what to do about it
    """
    where = f"{hop.address} port {hop.port}"
    try:
        return (begun or Dial(hop)).finish()
    except (socket.gaierror, UnicodeError):  # the latter of what is no name: two dots in a row
        raise _host_error(
            f"the name {hop.address} is not known; correct the hostfile, DNS or /etc/hosts"
        ) from None
    except ConnectionRefusedError:
        raise _host_error(f"{where} refused the connection; is sshd running there, on this port?") from None
    except TimeoutError:
        raise _host_error(
            f"{where} did not answer within {hop.connect_timeout_s:g} s; is the host up and not behind a firewall?"
        ) from None
    except OSError as error:
        raise _host_error(f"cannot reach {where}: {error.strerror or error}") from None


def _host_error(message: str) -> LaunchError:
    return LaunchError(message, exit_code=EXIT_HOST)
