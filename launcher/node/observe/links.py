"""Waiting times of data from this host's workers to other hosts, as the kernel knows them for each socket.

It is loaded with the first numbers of a job, and needs no rights.
Sources: sock_diag(7); linux/inet_diag.h; `struct tcp_info` of linux/tcp.h, whose `tcpi_busy_time` grows while
         a socket has data that is not acknowledged (Linux 4.10), and `tcpi_rwnd_limited` while this is all
         that the other side takes
"""

from __future__ import annotations

import _socket  # socket is made of it, and takes 10 ms more
import os
import struct
import time

from ..system.kernel_file import read_text
from ..system.lean_stdlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any, NamedTuple
else:
    from ...wire.fast_tuple import Record as NamedTuple

MAX_PEERS = 8  # peers that are listed one by one: of a thousand hosts each may have a thousand
OTHERS = "*"  # all other peers together
LOOK_EVERY_S = 2.0  # at most so often
COST = 0.0005  # part of a core that looks and searches may take; after an expensive one the next is later
# at most so often: the kernel goes through its whole table then, which takes milliseconds
SEARCH_EVERY_S = 5.0
_SOCK_DIAG, _BY_FAMILY = 4, 20
_ONE, _ALL = 0x001, 0x301  # flags of a request
_ERROR_MESSAGE, _LAST_MESSAGE = 2, 3
_TCP, _ESTABLISHED, _INFO = 6, 1 << 1, 2
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48s")
_MESSAGE = struct.Struct("=4x48s16xI")  # name, inode
_NAME = struct.Struct("=4x16s16s12x")  # addresses
_MESSAGE_BYTES = 72
_ATTRIBUTE = struct.Struct("=HH")
_TCP_INFO = struct.Struct("=68xI28xI16xQ16xI20xQQ")  # rtt, all resent, acked, not sent, busy, not read
_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address among those of IPv6


class _Socket(NamedTuple):
    """A connection. All counts are since it was made."""

    family: int
    name: bytes  # its ports, addresses and cookie; the kernel gives no cookie twice
    inode: int
    source: str
    peer: str
    busy_us: int
    unread_us: int  # the part of it in which the other side took no more
    acked: int  # bytes
    resent: int  # segments
    queued: int  # bytes that have not been sent, now
    rtt_us: int


class Links:
    """Looks at the sockets of some processes and of those below them, as rarely as its cost demands."""

    def __init__(self, pids: Callable[[], Sequence[int]], *, proc: str = "/proc") -> None:
        self._pids, self._proc = pids, proc
        self._look_at = self._search_at = self._looked_at = 0.0
        self._before: dict[bytes, _Socket] = {}  # the workers' sockets, by name
        self._strange: set[bytes] = set()  # names of other sockets

    def look(self, now: float) -> dict[str, Any] | None:
        """Return the growth since the last look; None if it is too early, or there is nothing to see.

        `seconds`: since the last look. `from`: this host's addresses. `to`, by peer: `wait`, the part of the
        time in which data for it waited although the peer takes some, `out` bytes a second that it
        acknowledged, `resent` segments a second, `queued` bytes that wait now, and `rtt_ms`, the time until
        an answer.
        """
        if now < self._look_at:
            return None
        try:
            netlink = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW, _SOCK_DIAG)
            try:
                netlink.settimeout(2.0)
                return self._look(netlink, now)
            finally:
                netlink.close()
        except (AttributeError, OSError):  # this kernel has no such interface, or it is forbidden here
            self._look_at = float("inf")
            return None

    def _look(self, netlink: _socket.socket, now: float) -> dict[str, Any] | None:
        began = time.thread_time()
        sockets = {}
        for known in self._before.values():
            for one in _ask(netlink, known.family, name=known.name):
                sockets[one.name] = one
        found = _growth(self._before, sockets, now - self._looked_at)
        self._look_at = now + max(LOOK_EVERY_S, (time.thread_time() - began) / COST)
        if now >= self._search_at:
            began = time.thread_time()
            sockets.update(self._search(netlink))
            self._search_at = now + max(SEARCH_EVERY_S, (time.thread_time() - began) / COST)
        self._looked_at, self._before = now, sockets
        return found

    def _search(self, netlink: _socket.socket) -> dict[bytes, _Socket]:
        """Find the workers' connections to other hosts that are not known yet."""
        families = (_socket.AF_INET, _socket.AF_INET6)
        found = {one.name: one for family in families for one in _ask(netlink, family)}
        self._strange &= found.keys()
        unknown = found.keys() - self._before.keys() - self._strange
        inodes = self._inodes() if unknown else ()
        self._strange.update(name for name in unknown if found[name].inode not in inodes)
        return {name: found[name] for name in unknown - self._strange}

    def _inodes(self) -> set[int]:
        """Inodes of the sockets that the workers have open."""
        found: set[int] = set()
        left = list(self._pids())
        while left:
            pid = left.pop()
            folder = f"{self._proc}/{pid}"
            left += [int(word) for word in read_text(f"{folder}/task/{pid}/children").split()]
            with suppress(OSError):
                for name in os.listdir(f"{folder}/fd"):
                    with suppress(OSError):  # it was closed just now
                        target = os.readlink(f"{folder}/fd/{name}")
                        if target.startswith("socket:["):
                            found.add(int(target[8:-1]))
        return found


def _growth(
    before: dict[bytes, _Socket], sockets: dict[bytes, _Socket], seconds: float
) -> dict[str, Any] | None:
    """Return the growth between two looks at the same sockets."""
    peers: dict[str, list[tuple[_Socket, _Socket]]] = {}
    for name, now in sockets.items():
        if name in before:
            peers.setdefault(now.peer, []).append((before[name], now))
    if not peers or seconds <= 0:
        return None
    rows = {peer: _together(pairs, seconds) for peer, pairs in peers.items()}
    if len(rows) > MAX_PEERS:
        order = sorted(rows, key=lambda peer: rows[peer]["wait"] * rows[peer]["out"], reverse=True)
        rest = [pair for peer in order[MAX_PEERS:] for pair in peers[peer]]
        rows = {peer: rows[peer] for peer in order[:MAX_PEERS]}
        rows[OTHERS] = _together(rest, seconds)
    sources = {now.source for pairs in peers.values() for _, now in pairs}
    return {"seconds": round(seconds, 3), "from": sorted(sources), "to": rows}


def _together(pairs: list[tuple[_Socket, _Socket]], seconds: float) -> dict[str, Any]:
    """Combine the sockets to one peer: each counts by the bytes that it had to carry."""
    wanted = waited = rtt = acked = queued = resent = 0.0
    for was, now in pairs:
        sent = now.acked - was.acked
        busy_us = (now.busy_us - was.busy_us) - (now.unread_us - was.unread_us)
        weight = sent + now.queued + 1
        wanted += weight
        waited += weight * min(1.0, max(0.0, busy_us / 1e6 / seconds))
        rtt += weight * now.rtt_us / 1e3
        acked += sent
        queued += now.queued
        resent += now.resent - was.resent
    return {
        "wait": round(waited / wanted, 4),
        "out": round(acked / seconds),
        "resent": round(resent / seconds, 2),
        "queued": int(queued),
        "rtt_ms": round(rtt / wanted, 3),
    }


def _ask(netlink: _socket.socket, family: int, *, name: bytes = b"") -> Iterator[_Socket]:
    """Yield the TCP connection of this name, if it is there, or all of this network namespace to other hosts.

    Errors: OSError
    """
    request = _REQUEST.pack(family, _TCP, 1 << (_INFO - 1), 0, _ESTABLISHED, name)
    netlink.send(
        _HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _ONE if name else _ALL, 0, 0) + request
    )
    return _answers(netlink, family, has_last=not name)


def _answers(netlink: _socket.socket, family: int, *, has_last: bool) -> Iterator[_Socket]:
    """Yield the sockets in the kernel's messages, up to the last one."""
    while True:
        data = netlink.recv(1 << 17)
        place = 0
        while place + _HEADER.size <= len(data):
            length, kind, _, _, _ = _HEADER.unpack_from(data, place)
            if kind in (_ERROR_MESSAGE, _LAST_MESSAGE) or length < _HEADER.size:
                return
            if kind == _BY_FAMILY and length >= _HEADER.size + _MESSAGE_BYTES:
                one = _connection_in(data, place + _HEADER.size, place + length, family)
                if one is not None:
                    yield one
            place += (length + 3) & ~3
        if not has_last:
            return


def _connection_in(data: bytes, place: int, end: int, family: int) -> _Socket | None:
    name, inode = _MESSAGE.unpack_from(data, place)
    source, peer = _NAME.unpack(name)
    if source == peer:
        return None  # a connection within this host
    place += _MESSAGE_BYTES
    while place + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, place)
        if length < _ATTRIBUTE.size:
            return None
        if kind == _INFO and length >= _ATTRIBUTE.size + _TCP_INFO.size:
            rtt, resent, acked, queued, busy, unread = _TCP_INFO.unpack_from(data, place + _ATTRIBUTE.size)
            addresses = _shown(source, family), _shown(peer, family)
            return _Socket(family, name, inode, *addresses, busy, unread, acked, resent, queued, rtt)
        place += (length + 3) & ~3
    return None


def _shown(packed: bytes, family: int) -> str:
    if family == _socket.AF_INET or packed.startswith(_MAPPED):
        return _socket.inet_ntop(_socket.AF_INET, packed[:4] if family == _socket.AF_INET else packed[12:])
    return _socket.inet_ntop(family, packed)
