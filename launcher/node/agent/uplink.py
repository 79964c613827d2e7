"""The agent's end of the stream to the launcher."""

from __future__ import annotations

import os
import time

from ...wire.frames import MAGIC, Decoder, Frame, Problem, ProtocolError, encode
from ..system.lean_stdlib import Selector, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_HEARTBEAT_S = 120.0  # until the job gives its own
READ_BYTES = 1 << 16
WRITE_BYTES = 1 << 18
# Above HIGH the workers' pipes are left alone, so a slow reader slows the workers;
# below LOW they are read again.
OUTBOX_HIGH_BYTES = 1 << 20
OUTBOX_LOW_BYTES = 1 << 18


class Uplink:
    """Frames both ways without waiting, until the launcher hangs up or is silent for too long.

    `obey(frame)` is called for each frame that arrives. `pause(is_paused)` says whether the launcher is
    behind; it may say the same twice. `end()` is called when the launcher stops listening, and again whenever
    that shows.
    """

    def __init__(
        self,
        selector: Selector,
        *,
        obey: Callable[[Frame], None],
        pause: Callable[[bool], None],
        end: Callable[[], None],
        fds: tuple[int, int] = (0, 1),
    ) -> None:
        self.heartbeat_s = FIRST_HEARTBEAT_S
        self.hold_s = 0.0  # the silence that the launcher announced
        self._selector = selector
        self._obey = obey
        self._pause = pause
        self._end = end
        self._in, self._out = fds
        self._decoder = Decoder()
        self._outbox = bytearray(MAGIC)  # goes out with the first frame
        self.is_connected = True  # to a launcher that listens
        self._heard_at = time.monotonic()
        for fd in fds:
            os.set_blocking(fd, False)
        selector.on_read(self._in, self._read)

    @property
    def has_unsent(self) -> bool:
        """Tell whether frames are left that may still reach the launcher."""
        return self.is_connected and bool(self._outbox)

    @property
    def is_behind(self) -> bool:
        """Tell whether the launcher reads less than it is sent."""
        return len(self._outbox) > OUTBOX_LOW_BYTES

    def send(self, frame: Frame) -> None:
        """Send now, or as soon as the launcher reads on; drop the frame if it is gone."""
        if self.is_connected:
            self._outbox += encode(frame)
            self._flush()

    def check_silence(self, now: float) -> None:
        """Hang up if the launcher said nothing for too long.

        If it can still hear us, it is told why.
        """
        silent_s = now - self._heard_at
        if silent_s > max(self.heartbeat_s, self.hold_s):
            if self.is_connected:
                with suppress(OSError):
                    os.write(
                        2,
                        b"it heard nothing of the launcher for %d s, as if no packet came through\n"
                        % silent_s,
                    )
            self._hang_up()

    def _flush(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: os.write(self._out, self._outbox[:WRITE_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            self._hang_up()
            return
        is_waiting = self._out in self._selector
        if self._outbox and not is_waiting:
            self._selector.on_write(self._out, self._flush)
        elif is_waiting and not self._outbox:
            self._selector.forget(self._out)
        if len(self._outbox) > OUTBOX_HIGH_BYTES:
            self._pause(True)
        elif len(self._outbox) < OUTBOX_LOW_BYTES:
            self._pause(False)

    def _read(self) -> None:
        try:
            data = os.read(self._in, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up()
            return
        self._heard_at = time.monotonic()
        try:
            for frame in self._decoder.feed(data):
                self._obey(frame)
        except ProtocolError:
            self._hang_up()
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            why = (
                f"its agent cannot do what it was told: {type(error).__name__}: {error}; is "
                "that the same dslaunch?"
            )
            self.send(Problem(why, 3))
            self._end()

    def _hang_up(self) -> None:
        """Take the launcher for gone: it reads nothing that we write."""
        if self.is_connected:
            self.is_connected = False
            for fd in (self._in, self._out):
                self._selector.forget(fd)
            self._outbox.clear()
            self._pause(False)
        self._end()
