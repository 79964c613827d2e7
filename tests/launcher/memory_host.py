"""A host that is a channel in this process: it answers as an agent would, or as a test says instead."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from dslaunch.launcher.backends.bootstrap import agent_source
from dslaunch.launcher.wire.frames import (
    MAGIC,
    Decoder,
    Done,
    Exited,
    Frame,
    Hello,
    Listen,
    Listening,
    Ping,
    Pong,
    Prepare,
    Reach,
    Reached,
    Ready,
    Start,
    Started,
    Stop,
    encode,
)

SOURCE = agent_source()
Change = Callable[[Frame | None], list[Frame | bytes] | None]


class MemoryHost:
    """Its workers end with `code`; None means that they run until they are stopped.

    `change` is asked first: with None for what comes at the beginning, then with each frame that arrives. Its answer is
    sent instead of the honest one, unless it is None. b"" ends the stream.
    """

    local_address = "10.0.0.9"

    def __init__(
        self, ranks: tuple[int, ...], change: Change = lambda frame: None, *, code: int | None = 0
    ) -> None:
        self._ranks = ranks
        self._change = change
        self._code = code
        self._decoder = Decoder()
        self._has_source = False
        self._to_read: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.heard: list[Frame] = []
        self.is_closed = False
        hello = Hello(hostname="memory", python="3.11.2", reached_at="10.0.0.1", num_devices=0, pid=7)
        changed = change(None)
        self._say([MAGIC, hello] if changed is None else changed)

    def read(self) -> bytes:
        return self._to_read.get()

    def write(self, data: bytes) -> None:
        if not self._has_source:  # the first that is written, as a whole
            self._has_source = True
            return
        for frame in self._decoder.feed(data):
            self.heard.append(frame)
            changed = self._change(frame)
            self._say(self._honest(frame) if changed is None else changed)

    def error_text(self) -> str:
        return ""

    def exit_status(self) -> int | None:
        return None

    def close(self) -> None:
        self.is_closed = True
        self._to_read.put(b"")

    def _say(self, answers: list[Frame | bytes]) -> None:
        for one in answers:
            self._to_read.put(one if isinstance(one, bytes) else encode(one))

    def _honest(self, frame: Frame) -> list[Frame | bytes]:
        if isinstance(frame, Ping):
            return [Pong(frame.number, time.monotonic())]
        if isinstance(frame, Prepare):
            return [Ready(29500, [])]
        if isinstance(frame, Listen):
            return [Listening(29500, ["10.0.0.1"], "")]
        if isinstance(frame, Reach):
            return [Reached([""] * len(frame.addresses))]
        if isinstance(frame, Start):
            started: list[Frame | bytes] = [Started(rank, 100 + rank) for rank in self._ranks]
            return started if self._code is None else [*started, *self._ends(self._code, 0)]
        return self._ends(143, 15) if isinstance(frame, Stop) else []

    def _ends(self, code: int, signum: int) -> list[Frame | bytes]:
        return [*(Exited(rank, code, signum, time.monotonic()) for rank in self._ranks), Done(0)]
