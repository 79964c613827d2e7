"""Who can connect to whom, tried instead of guessed. Sent to the nodes: standard library only.

One host listens and answers every connection with a token; the others try its addresses. The token tells the host that
was meant from whoever else answers: an address such as Docker's 172.17.0.1 is on every host, and each reaches itself.
"""

from __future__ import annotations

import _socket  # socket takes 3 ms more, and only the first host of a job needs it
import errno
import os
import struct
import time
from _thread import allocate_lock, start_new_thread

from .lean import suppress

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    import socket
    from _thread import LockType

MAX_OPEN = 4096  # connections that are held; more come from strangers only
_CLOSE_WITH_RESET = struct.pack("ii", 1, 0)  # so that no connection lingers on the port that rank 0 will take

# rtnetlink(7): one request for all addresses, and what its answers are made of.
_REQUEST_ADDRESSES = struct.pack("=IHHIIBBHI", 24, 22, 0x301, 1, 0, 0, 0, 0, 0)
_HEADER = struct.Struct("=IHHII")
_ADDRESS = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_ADDRESS_MESSAGE, _ERROR_MESSAGE, _LAST_MESSAGE = 20, 2, 3
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_SCOPE_LINK, _SCOPE_HOST = 253, 254


class Listener:
    """Answers every connection to a port, on all addresses of this host, with the token."""

    def __init__(self, port: int, token: str) -> None:
        """Errors: OSError, EADDRINUSE if the port is taken."""
        self._token = token.encode()
        self._server = listen_on_all(port)
        self._server.setblocking(False)
        self._open: list[socket.socket] = []

    def fileno(self) -> int:
        return self._server.fileno()

    def accept(self) -> None:
        """Answer whoever connected. They close the connection, or we do at the end."""
        with suppress(OSError):
            connection, _ = self._server.accept()
            connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_LINGER, _CLOSE_WITH_RESET)
            connection.setblocking(False)
            self._open.append(connection)
            connection.send(self._token)
        while len(self._open) > MAX_OPEN:
            self._open.pop(0).close()

    def close(self) -> None:
        for one in (self._server, *self._open):
            one.close()


def listen_on_all(port: int) -> socket.socket:
    """A listening socket on every address of this host, IPv4 and IPv6; port 0 means any."""
    import socket

    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def try_addresses(addresses: list[str], port: int, token: str, timeout_s: float) -> list[str]:
    """Try all at the same time. For each: empty if the host that is meant answered, else why not."""
    problems = [f"did not answer within {timeout_s:g} s" for _ in addresses]

    def work(place: int, done: LockType) -> None:
        problems[place] = _try(addresses[place], port, token, timeout_s)
        done.release()

    locks = [allocate_lock() for _ in addresses]
    for place, lock in enumerate(locks):
        lock.acquire()
        start_new_thread(work, (place, lock))  # looking up a name may take any time
    deadline = time.monotonic() + timeout_s + 0.5
    for lock in locks:
        lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
    return list(problems)


def _try(address: str, port: int, token: str, timeout_s: float) -> str:
    expected = token.encode()
    data = b""
    connection = None
    try:
        connection = _connect(address, port, timeout_s)
        while len(data) < len(expected):
            part = connection.recv(len(expected) - len(data))
            if not part:
                break
            data += part
    except _socket.gaierror:
        return "is not a name that is known there"
    except _socket.timeout:
        return f"did not answer within {timeout_s:g} s"
    except ConnectionRefusedError:
        return "refused the connection"
    except OSError as error:
        return f"cannot be reached: {os.strerror(error.errno) if error.errno else error}"
    finally:
        if connection is not None:
            connection.close()
    return "" if data == expected else "is another host or program"


def _connect(address: str, port: int, timeout_s: float) -> _socket.socket:
    """As socket.create_connection().

    Errors: OSError of the last address that the name has.
    """
    failure = OSError(f"{address} has no address")
    for family, kind, protocol, _, where in _socket.getaddrinfo(address, port, 0, _socket.SOCK_STREAM):
        connection = _socket.socket(family, kind, protocol)
        try:
            connection.settimeout(timeout_s)
            connection.connect(where)
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure


def own_addresses() -> list[str]:
    """The addresses of this host that others might reach, in the kernel's order: no loopback, none of one link only."""
    import socket

    found: list[str] = []
    with suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        netlink.settimeout(2.0)
        netlink.send(_REQUEST_ADDRESSES)
        while True:
            data = netlink.recv(1 << 17)
            while len(data) >= _HEADER.size:
                length, kind, _, _, _ = _HEADER.unpack_from(data)
                if kind in (_ERROR_MESSAGE, _LAST_MESSAGE) or length < _HEADER.size:
                    return found
                if kind == _ADDRESS_MESSAGE:
                    found += _address_in(data[_HEADER.size : length])
                data = data[(length + 3) & ~3 :]
    return found


def _address_in(message: bytes) -> list[str]:
    """The address that one message of the kernel is about, if others might reach it."""
    family, _, _, scope, _ = _ADDRESS.unpack_from(message)
    attributes: dict[int, bytes] = {}
    place = _ADDRESS.size
    while place + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, place)
        if length < _ATTRIBUTE.size:
            break
        attributes[kind] = message[place + _ATTRIBUTE.size : place + length]
        place += (length + 3) & ~3
    packed = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS, b""))
    if family not in (_socket.AF_INET, _socket.AF_INET6) or scope in (_SCOPE_LINK, _SCOPE_HOST):
        return []
    import ipaddress  # here: it takes 1.5 ms, and only the first host of a job is asked

    try:
        address = ipaddress.ip_address(packed)
    except ValueError:
        return []
    return [] if address.is_loopback or address.is_link_local else [str(address)]


def why_not_listening(port: int, error: OSError) -> str:
    """One sentence for a port that cannot be listened on."""
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use"
    return f"port {port} cannot be used: {os.strerror(error.errno or 0)}"
