"""Streams and events of a GPU that is not there, and how much of their work the host knows to be done."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from typing import Any

import torch

_POLLS = 2  # queries of an event that find it not yet done
_HOST: Counter[int] = Counter()  # what the host knows to be done, by stream
_STREAMS: weakref.WeakSet[PlannedStream] = weakref.WeakSet()
_ids = itertools.count()


class PlannedStream:
    """A stream. Its work takes no time, but the host knows that it is done only after a wait, or when it has
    asked an event often enough.
    """

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.stream_id = self.cuda_stream = next(_ids)
        self.priority = priority
        self.clock: Counter[int] = Counter()  # what is done before its next work, by stream
        _STREAMS.add(self)

    def wait_event(self, event: Any) -> None:
        """Let later work come after the event."""
        self.clock |= event.clock

    def wait_stream(self, stream: Any) -> None:
        """Let later work come after all that the other stream has so far."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        """Return an event that comes after all work so far."""
        event = PlannedEvent() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Return that all is done."""
        return True

    def is_capturing(self) -> bool:
        """Return that no CUDA graph is made of it."""
        return False

    def synchronize(self) -> None:
        """Let the host know that all is done."""
        self.record_event().synchronize()

    def __enter__(self) -> PlannedStream:
        _CURRENT.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.pop()


class PlannedEvent:
    """A place in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.event_id = self.cuda_event = next(_ids)
        self.clock: Counter[int] = Counter()
        self._of: tuple[int, int] | None = None  # stream and time
        self._num_polls = 0

    def record(self, stream: Any = None) -> None:
        """Put it behind the work of the stream so far."""
        stream = _CURRENT[-1] if stream is None else stream
        stream.clock[stream.stream_id] += 1
        self.clock = Counter(stream.clock)
        self._of, self._num_polls = (stream.stream_id, stream.clock[stream.stream_id]), 0

    def wait(self, stream: Any = None) -> None:
        """Let later work of the stream come after it."""
        (_CURRENT[-1] if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        """Tell whether the host knows that it has happened."""
        if self.is_known:
            return True
        self._num_polls += 1
        if self._num_polls <= _POLLS:
            return False
        self.synchronize()
        return True

    @property
    def is_known(self) -> bool:
        """Whether the host knows that it has happened, without asking for it."""
        return self._of is None or _HOST[self._of[0]] >= self._of[1]

    def synchronize(self) -> None:
        """Let the host know that it has happened."""
        for stream, time in self.clock.items():
            _HOST[stream] = max(_HOST[stream], time)

    def elapsed_time(self, other: Any) -> float:
        """Return that nothing took time."""
        return 0.0


DEFAULT = PlannedStream()
_CURRENT = [DEFAULT]


def current_stream(device: Any = None) -> PlannedStream:
    """Return the stream that work goes to."""
    return _CURRENT[-1]


def host_waits() -> None:
    """Note that the host waits for all work of the current stream, as in a copy that it needs."""
    _CURRENT[-1].synchronize()


def synchronize(device: Any = None) -> None:
    """Let the host know that all work is done."""
    for stream in _STREAMS:
        stream.synchronize()


class InStream:
    """The stream that is the current one inside a `with` block."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        _CURRENT.append(_CURRENT[-1] if self._stream is None else self._stream)

    def __exit__(self, *_: object) -> None:
        _CURRENT.pop()
