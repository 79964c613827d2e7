"""Many byte streams over one: the protocol between a launcher and a relay on a gateway.

Nine bytes of head (kind, number of the stream, length of the payload), then the payload. Neither side sends
more DATA on a stream than the other has granted, WINDOW_BYTES at first: so both always read, and a stream
that is not read holds up no other and takes no more memory than that.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from .frames import ProtocolError

MAGIC = b"\0dslaunch relay 1\n"  # the relay's first bytes; the output of a login script may stand before it
WINDOW_BYTES = 1 << 19
MAX_DATA_BYTES = 1 << 16  # limit of one parcel, so that no stream keeps the others waiting
_MAX_BYTES = 1 << 20
_HEAD = struct.Struct(">BII")
_COUNT = struct.Struct(">I")


class ParcelKind(IntEnum):
    OPEN = 1  # down: start this command (JSON); its stdin and stdout are the stream
    DATA = 2  # both ways
    GRANT = 3  # both ways: so many more bytes may be sent
    CLOSE = 4  # down: end the command; of stream 0: end all, and yourself
    ENDED = 5  # up: it ended; JSON [exit status, the end of its stderr]
    ALIVE = 6  # up: a sign of life only


class Parcel(NamedTuple):
    kind: ParcelKind
    stream: int
    payload: bytes


def pack(kind: ParcelKind, stream: int, payload: bytes = b"") -> bytes:
    return _HEAD.pack(kind, stream, len(payload)) + payload


def pack_grant(stream: int, num_bytes: int) -> bytes:
    return pack(ParcelKind.GRANT, stream, _COUNT.pack(num_bytes))


def granted(payload: bytes) -> int:
    """Return how many bytes a GRANT allows. Errors: ProtocolError if it does not say."""
    try:
        (count,) = _COUNT.unpack(payload)
    except struct.error:
        raise ProtocolError("a grant without a number") from None
    return int(count)


class Unpacker:
    """Cuts the one stream into parcels. Feed it the bytes that arrive; it returns the complete parcels."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Parcel]:
        """Errors: ProtocolError if the stream cannot be this protocol; it is then useless."""
        self._pending += data
        parcels: list[Parcel] = []
        start = 0
        while len(self._pending) - start >= _HEAD.size:
            kind, stream, length = _HEAD.unpack_from(self._pending, start)
            if length > _MAX_BYTES:
                raise ProtocolError(f"a parcel of {length} bytes; at most {_MAX_BYTES} are allowed")
            end = start + _HEAD.size + length
            if len(self._pending) < end:
                break
            try:
                parcels.append(
                    Parcel(ParcelKind(kind), stream, bytes(self._pending[start + _HEAD.size : end]))
                )
            except ValueError:
                raise ProtocolError(f"a parcel of the unknown kind {kind}") from None
            start = end
        del self._pending[:start]
        return parcels
