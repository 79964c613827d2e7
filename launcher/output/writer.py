"""Writing in a thread of its own: a slow or lost reader or disk holds up nothing else."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from itertools import groupby
from typing import IO, NamedTuple, Protocol

from ..errors import LaunchError

EXIT_NOT_READ = 141  # the status of a program that SIGPIPE ended
BATCH_BYTES = 1 << 18  # small pieces that wait are written together
_POLL_S = 0.1


class Sink(Protocol):
    """A destination of bytes."""

    def write(self, data: bytes) -> None:
        """Write all of `data`; may block.

        Errors: OSError; nothing more is then written to this sink
        """
        ...

    def failure(self, error: OSError) -> LaunchError:
        """Return the sentence for such an error."""
        ...


class _Item(NamedTuple):
    sink: Sink
    data: bytes
    on_done: Callable[[], None] | None


class Writer:
    """Takes bytes for sinks and writes them in the order they were given.

    No call waits: a caller that must not run ahead of the reader passes `on_done` and holds back until it was
    called. It is called exactly once, also if the data could not be written.
    """

    def __init__(self) -> None:
        self.failure: LaunchError | None = None  # the first sink that could not be written to
        self._muted: set[Sink] = set()
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._in_hand: list[_Item] = []  # taken from the queue and not yet written
        self._is_given_up = False
        self._progress_at = 0.0
        self._num_put = 0
        self._num_written = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def is_idle(self) -> bool:
        """Tell whether all bytes are written."""
        return self._is_given_up or self._num_written >= self._num_put

    @property
    def stuck_s(self) -> float:
        """Return for how long none of the waiting bytes could be written."""
        return 0.0 if self.is_idle else time.monotonic() - self._progress_at

    def put(self, sink: Sink, data: bytes, on_done: Callable[[], None] | None = None) -> None:
        with self._lock:
            if not self._is_given_up:
                if self.is_idle:
                    self._progress_at = time.monotonic()
                self._num_put += 1
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
                    self._thread.start()
                self._queue.put(_Item(sink, data, on_done))
                return
        if on_done is not None:
            on_done()

    def give_up(self) -> None:
        """Drop all waiting and later bytes, so that no caller is held back any more."""
        with self._lock:
            self._is_given_up = True
            items, self._in_hand = self._in_hand, []
            with contextlib.suppress(queue.Empty):
                while True:
                    items.append(self._queue.get_nowait())
        _call_done(items)

    def drain(self, timeout_s: float = float("inf")) -> bool:
        """Wait until all bytes are written; False if that took too long."""
        deadline = time.monotonic() + timeout_s
        while not self.is_idle:
            if time.monotonic() > deadline:
                return False
            # A signal handler can run between two polls; a wait for a lock would not let it
            time.sleep(_POLL_S / 20)
        return True

    def _run(self) -> None:
        while True:
            for sink, items in groupby(self._take(), key=lambda item: item.sink):
                together = list(items)
                if sink not in self._muted and not self._is_given_up:
                    self._write(sink, b"".join(item.data for item in together))
                with self._lock:
                    done = [] if self._is_given_up else together
                    del self._in_hand[: len(together)]
                    self._progress_at = time.monotonic()
                _call_done(done)
                self._num_written += len(together)

    def _take(self) -> list[_Item]:
        """Return the waiting items, at least one."""
        items = [self._queue.get()]
        num_bytes = len(items[0].data)
        with contextlib.suppress(queue.Empty):
            while num_bytes < BATCH_BYTES:
                items.append(self._queue.get_nowait())
                num_bytes += len(items[-1].data)
        with self._lock:
            if not self._is_given_up:
                self._in_hand = list(items)
                return items
        _call_done(items)
        return []

    def _write(self, sink: Sink, data: bytes) -> None:
        try:
            sink.write(data)
        except OSError as error:
            self._muted.add(sink)
            self.failure = self.failure or sink.failure(error)


def _call_done(items: list[_Item]) -> None:
    for item in items:
        if item.on_done is not None:
            item.on_done()


class StreamSink:
    """Our stdout or stderr."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self._stream = stream
        self._name = name

    @property
    def is_terminal(self) -> bool:
        return self._stream.isatty()

    @property
    def num_columns(self) -> int:
        """Return the width of the terminal."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, io.UnsupportedOperation):
            return 80

    def write(self, data: bytes) -> None:
        while data:
            num_written = self._stream.write(data)
            if num_written is None:  # another process has made the open file that we share non-blocking
                select.select([], [self._stream], [], _POLL_S)
            data = data[num_written or 0 :]

    def failure(self, error: OSError) -> LaunchError:
        if isinstance(error, BrokenPipeError):
            return LaunchError(f"no process reads {self._name} any more", exit_code=EXIT_NOT_READ)
        return LaunchError(
            f"cannot write to {self._name}: {error.strerror}; send it to a file or a terminal that takes it"
        )


def unbuffered(stream: IO[str] | None) -> IO[bytes]:
    """Return the file below a standard stream, which drops all bytes if that was closed (`>&-`)."""
    if stream is None:
        return open(os.devnull, "wb", buffering=0)
    with contextlib.suppress(OSError):
        stream.flush()
    try:
        return open(stream.fileno(), "wb", buffering=0, closefd=False)
    except io.UnsupportedOperation:  # a test's stand-in
        return stream.buffer  # type: ignore[attr-defined, no-any-return]
