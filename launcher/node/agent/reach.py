"""Connections between hosts, tried instead of guessed.

One host listens and answers every connection with a token (listener.py); the others try its addresses. The
token proves that the right host answered: an address such as Docker's 172.17.0.1 is on every host, and each
reaches itself.
"""

from __future__ import annotations

import _socket  # socket is made of it, and takes 10 ms more
import os
import time
from _thread import allocate_lock, start_new_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _thread import LockType


def try_addresses(addresses: list[str], port: int, token: str, timeout_s: float) -> list[str]:
    """Try all at the same time. Return for each an empty text if the right host answered, else the reason."""
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
    """Connect as socket.create_connection() does.

    Errors: OSError for the last address of the name.
    """
    failure = OSError(f"{address} has no address")
    # Bytes, because a `str` is encoded as an international name, which needs modules that take 12 ms to load.
    name = address.encode() if address.isascii() else address
    for family, kind, protocol, _, where in _socket.getaddrinfo(name, port, 0, _socket.SOCK_STREAM):
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
