"""Frames from threads of the agent, sent by its loop."""

from __future__ import annotations

import os

from ...wire.frames import Frame
from ..system.lean_stdlib import Selector, deque, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Mailbox:
    """Frames in the order in which any thread posts them."""

    def __init__(self, selector: Selector, send: Callable[[Frame], None]) -> None:
        self._send = send
        self._waiting: deque[Frame] = deque()
        self._read, self._write = os.pipe()
        for fd in (self._read, self._write):
            os.set_blocking(fd, False)
        selector.on_read(self._read, self._empty)

    def post(self, frame: Frame) -> None:
        self._waiting.append(frame)
        with suppress(BlockingIOError):  # full: then the loop has been woken already
            os.write(self._write, b"\0")

    def _empty(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._read, 1 << 16)
        while self._waiting:
            self._send(self._waiting.popleft())
