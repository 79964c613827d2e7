"""Writing to stdout and stderr in a thread of its own: a reader that is slow, or gone, holds up nothing else."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from typing import IO

from .errors import LaunchError

EXIT_NOT_READ = 141  # as of a program that SIGPIPE ended
_POLL_S = 0.1


class Writer:
    """Takes bytes for stdout (1) and stderr (2) and writes them in the order they were given.

    Nobody waits: who must not run ahead of the reader passes `on_done` and holds back until it was called.
    """

    def __init__(self, out: IO[bytes], err: IO[bytes]) -> None:
        self.failure: LaunchError | None = None  # the first stream that could not be written to
        self._streams = {1: out, 2: err}
        self._muted: set[int] = set()
        self._queue: queue.SimpleQueue[tuple[int, bytes, Callable[[], None] | None]] = queue.SimpleQueue()
        self._num_put = 0
        self._num_written = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def put(self, number: int, data: bytes, on_done: Callable[[], None] | None = None) -> None:
        with self._lock:
            self._num_put += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
                self._thread.start()
            self._queue.put((number, data, on_done))

    def drain(self, timeout_s: float = float("inf")) -> bool:
        """Wait until all that was given is written; False if that took too long."""
        deadline = time.monotonic() + timeout_s
        while self._num_written < self._num_put:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S / 20)  # a signal handler may run in between, which a lock would not let it
        return True

    def _run(self) -> None:
        while True:
            number, data, on_done = self._queue.get()
            if number not in self._muted:
                self._write(number, data)
            if on_done is not None:
                on_done()
            self._num_written += 1

    def _write(self, number: int, data: bytes) -> None:
        stream = self._streams[number]
        try:
            while data:
                num_written = stream.write(data)
                if num_written is None:  # somebody made the open file that we share with them non-blocking
                    select.select([], [stream], [], _POLL_S)
                data = data[num_written or 0 :]
        except OSError as error:
            self._muted.add(number)
            name = "stdout" if number == 1 else "stderr"
            if isinstance(error, BrokenPipeError):
                failure = LaunchError(f"nobody reads {name} any more", exit_code=EXIT_NOT_READ)
            else:
                failure = LaunchError(
                    f"cannot write to {name}: {error.strerror}; send it to a file or a terminal that takes it"
                )
            self.failure = self.failure or failure


def unbuffered(stream: IO[str] | None) -> IO[bytes]:
    """The file below a standard stream; for one that was closed before we started (`>&-`), where bytes vanish."""
    if stream is None:
        return open(os.devnull, "wb", buffering=0)
    with contextlib.suppress(OSError):
        stream.flush()
    try:
        return open(stream.fileno(), "wb", buffering=0, closefd=False)
    except io.UnsupportedOperation:  # a test's stand-in
        return stream.buffer  # type: ignore[attr-defined, no-any-return]
