"""Many streams over one: what is packed comes out again, however it was cut on the way."""

from __future__ import annotations

import pytest

from dslaunch.launcher.wire.frames import ProtocolError
from dslaunch.launcher.wire.mux import Parcel, ParcelKind, Unpacker, granted, pack, pack_grant

PARCELS = [
    Parcel(ParcelKind.OPEN, 1, b'["ssh"]'),
    Parcel(ParcelKind.DATA, 1, bytes(range(256))),
    Parcel(ParcelKind.DATA, 2**32 - 1, b""),
    Parcel(ParcelKind.CLOSE, 0, b""),
]


@pytest.mark.parametrize("size", [1, 2, 9, 10, 1000])
def test_parcels_arrive_however_the_stream_is_cut(size: int) -> None:
    stream = b"".join(pack(*one) for one in PARCELS)
    unpacker = Unpacker()
    found = [one for at in range(0, len(stream), size) for one in unpacker.feed(stream[at : at + size])]
    assert found == PARCELS


def test_a_grant_says_its_number() -> None:
    (parcel,) = Unpacker().feed(pack_grant(7, 300_000))
    assert (parcel.kind, parcel.stream, granted(parcel.payload)) == (ParcelKind.GRANT, 7, 300_000)
    with pytest.raises(ProtocolError):
        granted(b"abc")


@pytest.mark.parametrize("data", [b"\x09" + bytes(8), b"\x02\0\0\0\1\xff\xff\xff\xff", b"SSH-2.0-OpenSSH"])
def test_what_cannot_be_a_parcel_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Unpacker().feed(data)
