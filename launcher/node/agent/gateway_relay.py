"""The relay: runs on a gateway and carries the streams between the launcher and other hosts.

It starts one `ssh` for each host that the launcher names and passes bytes on, without looking at them. It
ends when its input ends, and all the `ssh` end with it; the agents behind them see the end of their streams
and clean up. A launcher that vanished without closing the connection is noticed by those agents, and by the
relay once none of them is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable

from ...wire.frames import ProtocolError
from ...wire.mux import (
    MAGIC,
    MAX_DATA_BYTES,
    WINDOW_BYTES,
    Parcel,
    ParcelKind,
    Unpacker,
    granted,
    pack,
    pack_grant,
)
from ..system.process_tree import become_subreaper, die_with_parent, end_descendants

ALIVE_EVERY_S = 1.0
REAP_EVERY_S = 0.01  # while a process has closed its output but still runs
MAX_SILENCE_S = 10.0  # silence of the launcher, while there is no child
ERROR_TEXT_BYTES = 4096


class Child:
    """One `ssh`. `credit`: bytes of its output that may still be sent; `pending`: its unread input."""

    def __init__(self, stream: int, argv: list[str]) -> None:
        us = os.getpid()
        self.stream = stream
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            preexec_fn=lambda: die_with_parent(us, signal.SIGKILL),
        )
        pipes = (self.process.stdin, self.process.stdout, self.process.stderr)
        self.stdin, self.stdout, self.stderr = (pipe.fileno() for pipe in pipes if pipe is not None)
        for fd in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(fd, False)
        self.credit = WINDOW_BYTES
        self.pending = bytearray()
        self.num_written = 0  # bytes written to it for which no credit was granted yet
        self.error_text = b""
        self.is_readable = self.has_errors = True

    def close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


class GatewayRelay:
    """Serves one launcher over stdin and stdout."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._unpacker = Unpacker()
        self._outbox = bytearray(MAGIC)
        self._is_connected = True
        self._children: dict[int, Child] = {}
        self._heard_at = self._alive_at = time.monotonic()

    def run(self) -> None:
        """Carry the streams until the launcher is gone."""
        for fd in (0, 1):
            os.set_blocking(fd, False)
        self._selector.register(0, selectors.EVENT_READ, self._read_parcels)
        self._flush()
        while self._is_connected:
            is_ending = any(not child.is_readable for child in self._children.values())
            for key, _ in self._selector.select(REAP_EVERY_S if is_ending else ALIVE_EVERY_S):
                if self._selector.get_map().get(key.fd) is key:  # an earlier action may have closed it
                    act: Callable[[], None] = key.data
                    act()
            self._tick()

    def _tick(self) -> None:
        for child in list(self._children.values()):
            if not child.is_readable and child.process.poll() is not None:
                self._end(child)
        now = time.monotonic()
        if now - self._alive_at >= ALIVE_EVERY_S:
            self._alive_at = now
            self._send(pack(ParcelKind.ALIVE, 0))
        if not self._children and now - self._heard_at > MAX_SILENCE_S:
            self._is_connected = False

    # The launcher.

    def _read_parcels(self) -> None:
        try:
            data = os.read(0, 1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._heard_at = time.monotonic()
        self._is_connected = self._is_connected and bool(data)
        try:
            for parcel in self._unpacker.feed(data):
                self._obey(parcel)
        except ProtocolError:
            self._is_connected = False

    def _obey(self, parcel: Parcel) -> None:
        if parcel.kind is ParcelKind.OPEN:
            self._open(parcel.stream, json.loads(parcel.payload.decode()))
            return
        if parcel.kind is ParcelKind.CLOSE and parcel.stream == 0:
            self._is_connected = False
            return
        child = self._children.get(parcel.stream)
        if child is None:  # it ended before the launcher knew
            return
        if parcel.kind is ParcelKind.DATA:
            child.pending += parcel.payload
            self._write(child)
        elif parcel.kind is ParcelKind.GRANT:
            child.credit += granted(parcel.payload)
            self._watch(child)
        elif parcel.kind is ParcelKind.CLOSE:
            child.process.kill()
            child.is_readable = child.has_errors = False
            child.pending.clear()
            self._watch(child)

    def _send(self, data: bytes) -> None:
        self._outbox += data
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: os.write(1, self._outbox[: 1 << 18])]
        except BlockingIOError:
            pass
        except OSError:
            self._is_connected = False
        self._want(1, selectors.EVENT_WRITE, self._flush, is_wanted=bool(self._outbox))

    # The hosts.

    def _open(self, stream: int, argv: list[str]) -> None:
        try:
            child = Child(stream, argv)
        except OSError as error:
            why = (
                f"no {argv[0]} there"
                if isinstance(error, FileNotFoundError)
                else f"{argv[0]}: {error.strerror}"
            )
            self._send(pack(ParcelKind.ENDED, stream, json.dumps([127, why]).encode()))
            return
        self._children[stream] = child
        self._watch(child)

    def _read(self, child: Child) -> None:
        data = _read_some(child.stdout, min(child.credit, MAX_DATA_BYTES))
        if data:
            child.credit -= len(data)
            self._send(pack(ParcelKind.DATA, child.stream, data))
        elif data is not None:
            child.is_readable = False
        self._watch(child)

    def _read_errors(self, child: Child) -> None:
        data = _read_some(child.stderr, ERROR_TEXT_BYTES)
        if data is not None:
            child.error_text = (child.error_text + data)[-ERROR_TEXT_BYTES:]
            child.has_errors = bool(data)
        self._watch(child)

    def _write(self, child: Child) -> None:
        num_before = len(child.pending)
        try:
            while child.pending:
                del child.pending[: os.write(child.stdin, child.pending[:MAX_DATA_BYTES])]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, and will say so
            child.pending.clear()
        child.num_written += num_before - len(child.pending)
        if child.num_written >= WINDOW_BYTES // 2:
            self._send(pack_grant(child.stream, child.num_written))
            child.num_written = 0
        self._watch(child)

    def _end(self, child: Child) -> None:
        if child.has_errors:
            self._read_errors(child)
        child.is_readable = child.has_errors = False
        child.pending.clear()
        self._watch(child)
        child.close_pipes()
        del self._children[child.stream]
        said = [child.process.returncode, child.error_text.decode("utf-8", "replace")]
        self._send(pack(ParcelKind.ENDED, child.stream, json.dumps(said).encode()))

    def _watch(self, child: Child) -> None:
        read, write = selectors.EVENT_READ, selectors.EVENT_WRITE
        self._want(
            child.stdout, read, lambda: self._read(child), is_wanted=child.is_readable and child.credit > 0
        )
        self._want(child.stderr, read, lambda: self._read_errors(child), is_wanted=child.has_errors)
        self._want(child.stdin, write, lambda: self._write(child), is_wanted=bool(child.pending))

    def _want(self, fd: int, event: int, action: Callable[[], None], *, is_wanted: bool) -> None:
        is_watched = fd in self._selector.get_map()
        if is_wanted and not is_watched:
            self._selector.register(fd, event, action)
        elif is_watched and not is_wanted:
            self._selector.unregister(fd)


def _read_some(fd: int, num_bytes: int) -> bytes | None:
    """Return the bytes that are there; empty at the end; None if nothing is there now."""
    try:
        return os.read(fd, num_bytes)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def main() -> None:
    """Be a relay, and leave no process behind."""
    with contextlib.suppress(OSError):
        os.setsid()
    become_subreaper()  # an ssh may have started others, such as a ProxyCommand
    try:
        GatewayRelay().run()
    finally:
        end_descendants()
