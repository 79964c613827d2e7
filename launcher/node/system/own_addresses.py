"""The addresses of this host, from the kernel."""

from __future__ import annotations

import _socket  # socket is made of it, and takes 10 ms more
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# rtnetlink(7): one request for all addresses, and the parts of its answers.
_REQUEST_ADDRESSES = struct.pack("=IHHIIBBHI", 24, 22, 0x301, 1, 0, 0, 0, 0, 0)
_HEADER = struct.Struct("=IHHII")
_ADDRESS = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_ADDRESS_MESSAGE, _ERROR_MESSAGE, _LAST_MESSAGE = 20, 2, 3
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_SCOPE_LINK, _SCOPE_HOST = 253, 254


def own_addresses() -> list[str]:
    """Return the addresses of this host that others might reach, in the kernel's order: no loopback, no
    link-local ones.
    """
    netlink = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW, 0)
    try:
        netlink.settimeout(2.0)
        netlink.send(_REQUEST_ADDRESSES)
        return _addresses_in(lambda: netlink.recv(1 << 17))
    except OSError:
        return []
    finally:
        netlink.close()


def _addresses_in(receive: Callable[[], bytes]) -> list[str]:
    """Return the addresses in the kernel's messages, up to the last one."""
    found: list[str] = []
    while True:
        data = receive()
        while len(data) >= _HEADER.size:
            length, kind, _, _, _ = _HEADER.unpack_from(data)
            if kind in (_ERROR_MESSAGE, _LAST_MESSAGE) or length < _HEADER.size:
                return found
            if kind == _ADDRESS_MESSAGE:
                found += _address_in(data[_HEADER.size : length])
            data = data[(length + 3) & ~3 :]


def _address_in(message: bytes) -> list[str]:
    """Return the address in one message of the kernel, if others might reach it."""
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
    if scope in (_SCOPE_LINK, _SCOPE_HOST) or _is_of_no_use(family, packed):
        return []
    return [_socket.inet_ntop(family, packed)]


def _is_of_no_use(family: int, packed: bytes) -> bool:
    """Tell whether it is a loopback address, link-local, or of another kind than IPv4 and IPv6."""
    if family == _socket.AF_INET and len(packed) == 4:
        return packed[0] == 127 or packed[:2] == b"\xa9\xfe"
    if family == _socket.AF_INET6 and len(packed) == 16:
        return packed == bytes(15) + b"\x01" or (packed[0] == 0xFE and packed[1] & 0xC0 == 0x80)
    return True
