"""Copies between the device that computes and host memory, while the device goes on computing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import Lock

import torch
from torch import Tensor

from ..comm.pending import Pending
from ..tracing.spans import SPANS
from .pinned_memory import PINNED_MEMORY, host_empty


class Arrival:
    """A copy under way. Its source stays alive until the copy is done.

    [Note: memory that a copy uses]
    The allocator gives freed memory to the next request in the stream where it was allocated, but copies run
    in another stream. So the source of a copy to the host is held, and `then` frees it only when the copy's
    event has happened; nothing else may free it. The target of a copy to the device need not be held: it is
    used before it is freed, and by then its stream has waited for the event. For pinned memory, torch or
    pinned_memory.py know which copies use it. For other host memory this is unknown: on most machines the
    driver has read it when the call returns, but where a GPU reads the host's page tables, as on GH200, the
    copy may come later; so that source is held, too.
    """

    def __init__(self, source: Tensor, target: Tensor, *, then: Callable[[], None] | None = None) -> None:
        """Begin to copy. If `source` or `target` is on a GPU, the copy comes after all work queued on that
        GPU so far.

        `then` is called when the source has been read: at once, in `wait`,
        or when a later copy in the same direction begins.
        """
        self._source: Tensor | None = source
        self._then = then
        self._lock = Lock()
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        gpu = next((tensor for tensor in (source, target) if tensor.is_cuda), None)
        if gpu is None:
            since = time.monotonic_ns() if SPANS.is_on else 0
            target.copy_(source)
            if since:
                SPANS.add("copy", f"copy in host memory, {source.nbytes} bytes", since)
            self.wait()
            return
        copier = _copier(gpu.device, is_to_host=source.is_cuda)
        stream = self._stream = copier.stream
        stream.wait_stream(torch.cuda.current_stream(gpu.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        PINNED_MEMORY.note_use(target if source.is_cuda else source, stream, self._event)
        if source.is_cuda or then is not None or not source.is_pinned():
            copier.hold(self, source.nbytes)

    @property
    def is_done(self) -> bool:
        """Tell whether the copy is done, so that `wait` returns at once."""
        event = self._event  # another thread may take it away
        return event is None or bool(event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Block until the host may read the target."""
        with self._lock:  # the thread of a step and that of a hook may both wait
            if self._event is not None:
                is_done = self._event.query()  # type: ignore[no-untyped-call]
                with nullcontext() if is_done else SPANS.span("copy", "wait for a copy"):
                    self._event.synchronize()  # done or not: torch's detector of races knows of no query
            self._event = self._source = None
            then, self._then = self._then, None
        if then is not None:
            then()

    def first(self) -> AbstractContextManager[object]:
        """Let the GPU's work that is queued inside come after the copy, and no other work."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait_on_device(self) -> None:
        """Let the GPU's work that is queued from now on come after the copy."""
        event = self._event
        if event is not None:
            event.wait()

    def release(self) -> None:
        """Let the GPU's work that is queued from now on come after the copy, and hold the source no longer:
        what gets its memory comes after the copy, too.
        """
        self.wait_on_device()
        with self._lock:
            self._event = self._source = None
            then, self._then = self._then, None
        if then is not None:
            then()


class Copier:
    """The stream of one device's copies in one direction, so that both directions of the bus are used. It
    also knows the copies whose sources are held; see [Note: memory that a copy uses].
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._held: deque[tuple[Arrival, int]] = deque()

    def hold(self, arrival: Arrival, num_bytes: int) -> None:
        """Hold the copy's source until the copy is done. The host waits for earlier copies only if all
        together would hold more than _HELD_BYTES.
        """
        self._held.append((arrival, num_bytes))
        while self._held and (
            self._held[0][0].is_done or (len(self._held) > 1 and self._held_bytes > _HELD_BYTES)
        ):
            self._held.popleft()[0].wait()

    @property
    def _held_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._held)


class _Brought(Pending):
    """A shard on its way from the host, and then to the other ranks."""

    def __init__(self, arrival: Arrival, then: Callable[[], Pending]) -> None:
        self._arrival = arrival
        with arrival.first():
            self._rest = then()

    def wait(self) -> None:
        self._arrival.wait_on_device()
        self._rest.wait()


def to_device(
    shard: Tensor, own: Tensor, *, then: Callable[[], Pending], when_read: Callable[[], None] | None = None
) -> Pending:
    """Begin to copy `shard` to `own`, [n] each; when it is there, `then` begins to send it to other ranks.

    `when_read` is called when `shard` has been read, as `then` of Arrival.
    """
    return _Brought(Arrival(shard, own, then=when_read), then)


def bring(source: Tensor, target: Tensor) -> None:
    """Copy `source` to `target`. To host memory the copy is done on return; to a GPU it has begun, and work
    that is queued on the GPU from now on comes after it.

    The caller may drop its reference to `source`, but not change it.
    """
    if target.is_cuda:
        Arrival(source, target).wait_on_device()
    else:
        target.copy_(source)


def to_host(tensor: Tensor, *, pin_memory: bool) -> Tensor:
    """Return a copy in host memory."""
    return host_empty(tensor.shape, tensor.dtype, pin_memory=pin_memory).copy_(tensor)


_HELD_BYTES = 256 * 2**20
_COPIERS: dict[tuple[torch.device, bool], Copier] = {}


def _copier(device: torch.device, *, is_to_host: bool) -> Copier:
    key = device, is_to_host
    if key not in _COPIERS:
        _COPIERS[key] = Copier(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return _COPIERS[key]
