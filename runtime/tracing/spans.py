"""Spans of work of this process, by name and time, while its steps are traced.

Code that adds spans looks at `SPANS.is_on` first, so that without a trace it costs one comparison.
Standard library only, so that all traced code may import it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

MAX_SPANS = 200_000  # limit of one trace; 40 MB of memory or so


_NOTHING = nullcontext()  # kept, because making it takes longer than entering it


class Span(NamedTuple):
    """`kind` is one of those in docs/train/trace.md, "The file". Units: nanoseconds of CLOCK_MONOTONIC."""

    kind: str
    name: str
    began: int
    ended: int
    thread: int  # the kernel's number
    args: dict[str, Any] | None


class Spans:
    """Spans of one process. Any thread may add some."""

    def __init__(self) -> None:
        self.is_on = False
        self.has_gpu = False
        self.num_dropped = 0
        self._spans: list[Span] = []
        self._num_left = MAX_SPANS

    def begin(self, *, has_gpu: bool = False) -> None:
        """Keep the spans from now on."""
        self.has_gpu = has_gpu
        self._spans, self._num_left, self.num_dropped = [], MAX_SPANS, 0
        self.is_on = True

    def end(self) -> None:
        """Keep no more spans."""
        self.is_on = False

    def take(self) -> list[Span]:
        """Return the spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def add(self, kind: str, name: str, began: int, ended: int = 0, **args: Any) -> None:
        """Add a span that has ended now, or at `ended`."""
        if self._num_left <= 0:
            self.num_dropped += 1
            return
        self._num_left -= 1
        ended = ended or time.monotonic_ns()
        self._spans.append(Span(kind, name, began, ended, threading.get_native_id(), args or None))

    def span(self, kind: str, name: str) -> AbstractContextManager[object]:
        """Add a span for the block; do nothing if nothing is traced."""
        return self._measured(kind, name) if self.is_on else _NOTHING

    @contextmanager
    def _measured(self, kind: str, name: str) -> Iterator[None]:
        began = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(kind, name, began)


SPANS = Spans()  # one for the process, as torch's profiler is
