"""The agents of hosts behind a gateway: many streams inside the one stream to the relay on the gateway.

[Note: Who is to blame]
When a gateway is lost, its children are lost with it, and the gateway must be named as the culprit. So the
children's readers learn of the end of a relay only after the gateway itself was given up, and the silence of
a relay counts as the children's only after it has lasted longer than a gateway may be silent.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable

from ..errors import EXIT_HOST, LaunchError
from ..wire.frames import ProtocolError
from ..wire.mux import (
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
from .bootstrap import ANNOUNCED, WANTS_TEXT, relay_source, relay_text
from .channel import Channel, WayLost

HELD_BACK_S = 5.0  # limit, if the gateway itself lives on
# silence after which a relay of a gateway that was given up is lost; it gives a sign of life every second
SILENT_S = 3.0
MAX_SILENCE_S = 20.0  # silence of a relay that may still be starting, for a host that is being connected
MAX_EXCUSE_S = 6.0  # longer than the time between two pings
LOOK_EVERY_S = 0.2
CLOSE_TIMEOUT_S = 2.0


class RelayStreams:
    """The launcher's end of a relay."""

    def __init__(self, stream: Channel, *, gateway: str, on_end: Callable[[], None] = lambda: None) -> None:
        """`stream` leads to a bootstrap on the gateway; `on_end` is called if it ends while hosts are
        connected.
        """
        self.gateway = gateway
        self._stream = stream
        self._on_end = on_end
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()
        self._channels: dict[int, RelayedChannel] = {}
        self._num_opened = 0
        self._heard_at = time.monotonic()
        self._ended_at: float | None = None
        self._is_given_up = False
        # Set when the relay runs, or has ended. Before, nothing but the relay's source may be sent.
        self._has_begun = threading.Event()
        self.why_ended = ""
        stream.write(relay_source())
        self._reader = threading.Thread(target=self._read, name=f"relay on {gateway}", daemon=True)
        self._reader.start()

    def open(
        self, argv: tuple[str, ...], *, timeout_s: float, on_close: Callable[[], None] = lambda: None
    ) -> RelayedChannel:
        """Start a command on the gateway that starts a bootstrap, and wait until the bootstrap announces
        itself.

        `on_close` is called when the channel was closed, or at once if no channel comes about.

        Errors: LaunchError with the command's output instead.
        """
        with self._lock:
            self._num_opened += 1
            number = self._num_opened
            channel = self._channels[number] = RelayedChannel(self, number, on_close)
        try:
            self._has_begun.wait(timeout_s)
            self.send(pack(ParcelKind.OPEN, number, json.dumps(argv).encode()))
            channel.wait_until_announced(timeout_s)
        except OSError as error:
            channel.close()
            raise LaunchError(
                f"the relay ended: {self.why_ended or error.strerror or error}", exit_code=EXIT_HOST
            ) from None
        except LaunchError:
            channel.close()
            raise
        return channel

    def send(self, data: bytes) -> None:
        """Send bytes to the relay. Errors: OSError if the relay ended."""
        with self._send_lock:
            self._stream.write(data)

    def silent_s(self) -> float:
        return time.monotonic() - self._heard_at

    @property
    def is_suspect(self) -> bool:
        """Tell whether the relay may be lost, so that its state must be asked for again and again."""
        return self._ended_at is not None or self._is_given_up

    @property
    def has_ended(self) -> bool:
        return self._ended_at is not None

    def is_lost(self) -> bool:
        """Tell whether the relay is lost: [Note: Who is to blame]"""
        if self._ended_at is not None:
            return self._is_given_up or time.monotonic() - self._ended_at > HELD_BACK_S
        return self._is_given_up and self.silent_s() > SILENT_S

    def give_up(self) -> None:
        """Take note that the gateway itself was given up."""
        self._is_given_up = True
        self._wake_all()

    def forget(self, number: int) -> None:
        """Forget a channel that was closed."""
        with self._lock:
            self._channels.pop(number, None)

    def close(self) -> None:
        """End the relay, and with it all that it started; wait for that, unless it looks dead."""
        if not self.has_ended and self.silent_s() < SILENT_S:
            with contextlib.suppress(OSError):
                self.send(pack(ParcelKind.CLOSE, 0))
                self._reader.join(CLOSE_TIMEOUT_S)
        self._stream.close()

    def _read(self) -> None:
        why = ""
        try:
            self._read_parcels()
            why = next(reversed(self._stream.error_text().strip().splitlines()), "")
        except ProtocolError as error:
            why = str(error)
        except OSError as error:
            why = error.strerror or str(error)
        finally:
            self.why_ended = why or "the connection ended"
            self._ended_at = time.monotonic()
            self._has_begun.set()
            self._wake_all()
            if self._channels:
                self._on_end()

    def _read_parcels(self) -> None:
        unpacker, noise, is_relay = Unpacker(), b"", False
        while data := self._stream.read():
            self._heard_at = time.monotonic()
            if not is_relay:
                noise, magic, data = (noise + data).partition(MAGIC)
                if WANTS_TEXT in noise and not magic:
                    noise = b""
                    self._stream.write(relay_text())
                noise = noise[-len(MAGIC) - len(WANTS_TEXT) :]
                is_relay = bool(magic)
            if is_relay:
                self._has_begun.set()
                for parcel in unpacker.feed(data):
                    channel = self._channels.get(parcel.stream)
                    if channel is not None:
                        channel.take(parcel)

    def _wake_all(self) -> None:
        with self._lock:
            channels = list(self._channels.values())
        for channel in channels:
            channel.wake()


class RelayedChannel:
    """A bootstrap on a host behind a gateway."""

    local_address = ""

    def __init__(self, relay: RelayStreams, number: int, on_close: Callable[[], None]) -> None:
        self._on_close = on_close
        self._relay = relay
        self._number = number
        self._changed = threading.Condition()
        self._received = bytearray()
        self._num_read = 0  # bytes for which no credit was granted yet
        self._credit = WINDOW_BYTES
        self._has_ended = False  # whether the command on the gateway has ended
        self._is_closed = False
        self._error_text = ""
        self._exit_status: int | None = None

    def read(self) -> bytes:
        """Read as a Channel does. Errors: WayLost if the gateway is lost."""
        with self._changed:
            while not self._received and not self._has_ended and not self._is_closed:
                if self._relay.is_lost():
                    raise WayLost(
                        f"lost together with {self._relay.gateway}, through which it was reached; "
                        "what runs there ends by itself"
                    )
                self._changed.wait(LOOK_EVERY_S if self._relay.is_suspect else None)
            data = bytes(self._received)
            self._received.clear()
        self._grant(len(data))
        return data

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            with self._changed:
                while not self._credit and not self._is_over():
                    self._changed.wait()
                if self._is_over():
                    raise OSError("the stream is closed")
                size = min(len(view), self._credit, MAX_DATA_BYTES)
                self._credit -= size
            self._relay.send(pack(ParcelKind.DATA, self._number, bytes(view[:size])))
            view = view[size:]

    def error_text(self) -> str:
        with self._changed:
            return self._error_text

    def exit_status(self) -> int | None:
        with self._changed:
            return self._exit_status

    def way_silent_s(self) -> float:
        return min(self._relay.silent_s(), MAX_EXCUSE_S)

    def close(self) -> None:
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            self._changed.notify_all()
        if was_closed:
            return
        if not self._is_over_there():
            with contextlib.suppress(OSError):  # the relay is gone, and its commands with it
                self._relay.send(pack(ParcelKind.CLOSE, self._number))
        self._relay.forget(self._number)
        self._on_close()

    def wait_until_announced(self, timeout_s: float) -> None:
        """Skip the output of login scripts.

        Errors: LaunchError if the command, its time or the relay ended before the bootstrap announced itself.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                noise, announced, rest = bytes(self._received).partition(ANNOUNCED)
                kept = rest if announced else noise[-len(ANNOUNCED) :]
                num_skipped = len(self._received) - len(kept)
                self._received[:] = kept
                if not announced and not num_skipped:
                    self._raise_if_over(timeout_s if time.monotonic() > deadline else None)
                    self._changed.wait(LOOK_EVERY_S)
            self._grant(num_skipped)
            if announced:
                return

    def take(self, parcel: Parcel) -> None:
        """Take a parcel from the relay. Never blocks."""
        with self._changed:
            if parcel.kind is ParcelKind.DATA:
                self._received += parcel.payload
            elif parcel.kind is ParcelKind.GRANT:
                self._credit += granted(parcel.payload)
            elif parcel.kind is ParcelKind.ENDED:
                self._exit_status, text = _ending_of(parcel.payload)
                self._error_text = text or (
                    f"ssh ended with {self._exit_status}" if self._exit_status else ""
                )
                self._has_ended = True
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._is_closed or self._is_over_there()

    def _is_over_there(self) -> bool:
        return self._has_ended or self._relay.has_ended

    def _raise_if_over(self, waited_s: float | None) -> None:
        if self._has_ended:
            lines = [one.strip() for one in self._error_text.splitlines() if one.strip()]
            raise LaunchError(lines[-1] if lines else "ssh ended", exit_code=EXIT_HOST)
        if self._relay.has_ended:
            raise LaunchError(f"the relay ended: {self._relay.why_ended}", exit_code=EXIT_HOST)
        if self._relay.silent_s() > MAX_SILENCE_S:
            raise LaunchError(f"the relay is silent for {MAX_SILENCE_S:g} s", exit_code=EXIT_HOST)
        if waited_s is not None:
            raise LaunchError(f"nothing came within {waited_s:g} s", exit_code=EXIT_HOST)

    def _grant(self, num_bytes: int) -> None:
        """Let the relay send as many further bytes; small amounts are collected first."""
        self._num_read += num_bytes
        if self._num_read >= WINDOW_BYTES // 2 and not self._is_over():
            try:
                self._relay.send(pack_grant(self._number, self._num_read))
            except OSError:
                return  # the reader of the relay's stream notices the error
            self._num_read = 0


def _ending_of(payload: bytes) -> tuple[int, str]:
    """Return the exit status of a command and its last words. Errors: ProtocolError for another payload"""
    try:
        code, text = json.loads(payload.decode())
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"not how a command ends: {payload[:80]!r}") from error
    if type(code) is not int or not isinstance(text, str):
        raise ProtocolError(f"not how a command ends: {payload[:80]!r}")
    return code, text
