"""Progress of a long piece of work: a bar on a terminal, plain lines elsewhere, nothing for short work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_PATIENCE_S = 2.0
_BAR_EVERY_S, _LINE_EVERY_S = 0.2, 10.0
_BAR_WIDTH = 30


class ProgressMeter:
    """Progress of one piece of work of known bytes; call `advance` as it goes on.

    Also a context, which ends the line of a bar.
    """

    def __init__(
        self,
        what: str,
        total_bytes: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total_bytes = what, total_bytes
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._is_bar = self._stream.isatty()
        self._begun_at = clock()
        self._next_at = self._begun_at + _PATIENCE_S
        self._done_bytes = 0
        self._width = 0  # width of the bar that is shown

    def advance(self, num_bytes: int) -> None:
        """Count so many bytes more as done."""
        self._done_bytes += num_bytes
        now = self._clock()
        if now >= self._next_at:
            self._next_at = now + (_BAR_EVERY_S if self._is_bar else _LINE_EVERY_S)
            self._show(now)

    def __enter__(self) -> ProgressMeter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._width:
            self._show(self._clock())
            self._stream.write("\n")
            self._stream.flush()

    def _show(self, now: float) -> None:
        speed = self._done_bytes / max(now - self._begun_at, 1e-9)
        share = self._done_bytes / max(self._total_bytes, 1)
        left_s = (self._total_bytes - self._done_bytes) / max(speed, 1e-9)
        text = (
            f"{self._what}: {self._done_bytes / 1e9:.2f} of {self._total_bytes / 1e9:.2f} GB, "
            f"{speed / 1e9:.2f} GB/s, {left_s:.0f} s left"
        )
        if self._is_bar:
            filled = int(_BAR_WIDTH * min(share, 1.0))
            text = f"[{'#' * filled:<{_BAR_WIDTH}}] {text}"
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()
