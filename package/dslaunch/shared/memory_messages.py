"""Messages between a worker and the memory server of its host's agent, and between such servers: a length,
then JSON; descriptors of files travel beside it.

The file travels to nodes, whose Python may be 3.8.
"""

from __future__ import annotations

import array
import json
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

TOKEN_BYTES = 32  # a connection over the network begins with the job's token
MAX_MESSAGE_BYTES = 64 << 20
_LENGTH_BYTES = 4
_MAX_DESCRIPTORS = 1


CONNECT_S = 5.0  # all addresses of a host together


class MessageError(OSError):
    """The other side hung up, or sent something that is no message."""


def connect_to(addresses: Sequence[str], port: int, *, token: str, silent_s: float) -> socket.socket:
    """Connect to the server of another host, which may be silent for `silent_s` from then on.

    Errors: OSError of the last address
    """
    failure = OSError("it has no address")
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=CONNECT_S / min(4, len(addresses)))
        except OSError as error:
            failure = error
        else:
            connection.settimeout(silent_s)
            connection.sendall(token.encode("ascii"))
            return connection
    raise failure


def send_message(
    connection: socket.socket, message: dict[str, Any], *, descriptor: int | None = None
) -> None:
    """Send a message, with a descriptor if one is given. Errors: OSError"""
    body = json.dumps(message).encode("ascii")
    data = len(body).to_bytes(_LENGTH_BYTES, "big") + body
    if descriptor is not None:
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]).tobytes())]
        data = data[connection.sendmsg([data], beside) :]
    connection.sendall(data)


def receive_message(connection: socket.socket) -> tuple[dict[str, Any], int | None]:
    """Return the next message, and the descriptor beside it. Errors: MessageError, OSError"""
    room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
    descriptor: int | None = None
    head = b""
    while len(head) < _LENGTH_BYTES:
        if connection.family == socket.AF_UNIX:
            part, beside, _, _ = connection.recvmsg(_LENGTH_BYTES - len(head), room, socket.MSG_CMSG_CLOEXEC)
            for level, kind, data in beside:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    found = array.array("i")
                    found.frombytes(data[: len(data) - len(data) % found.itemsize])
                    descriptor = found[0] if found else None
        else:
            part = connection.recv(_LENGTH_BYTES - len(head))
        if not part:
            raise MessageError("the other side hung up")
        head += part
    length = int.from_bytes(head, "big")
    if length > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {length} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        message = json.loads(bytes(receive_bytes(connection, length)))
    except ValueError:
        raise MessageError("something that is no message") from None
    if not isinstance(message, dict):
        raise MessageError("something that is no message")
    return message, descriptor


def receive_bytes(connection: socket.socket, num_bytes: int) -> bytearray:
    """Return so many bytes. Errors: MessageError if the stream ends before; OSError"""
    data = bytearray(num_bytes)
    receive_into(connection, memoryview(data))
    return data


def receive_into(connection: socket.socket, place: memoryview) -> None:
    """Fill the memory. Errors: MessageError if the stream ends before; OSError"""
    done = 0
    while done < len(place):
        count = connection.recv_into(place[done:])
        if not count:
            raise MessageError("the other side hung up")
        done += count
