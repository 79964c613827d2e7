"""Copies between the device that computes and host memory, beside what the device does meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..comm.collectives import Pending


class Arrival:
    """A copy under way. What it reads stays alive until it is there."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy; `source` or `target` may be on a GPU, and then the copy comes after all that it was told so far."""
        self._source: Tensor | None = source
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        gpu = next((tensor for tensor in (source, target) if tensor.is_cuda), None)
        if gpu is None:
            target.copy_(source)
            return
        stream = self._stream = _copy_stream(gpu.device)
        stream.wait_stream(torch.cuda.current_stream(gpu.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        gpu.record_stream(
            stream
        )  # whoever gives this memory back does not give it to others before the copy is done

    def wait(self) -> None:
        """Block until the host may use it."""
        if self._event is not None:
            self._event.synchronize()
        self._event = self._source = None

    def first(self) -> AbstractContextManager[object]:
        """Let what the GPU is told inside come after it, and nothing else."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait_on_device(self) -> None:
        """Let what the GPU is told from now on come after it."""
        if self._event is not None:
            self._event.wait()


class _Brought(Pending):
    """A shard on its way from the host, and then to the other ranks."""

    def __init__(self, arrival: Arrival, then: Callable[[], Pending]) -> None:
        self._arrival = arrival
        with arrival.first():
            self._rest = then()

    def wait(self) -> None:
        self._arrival.wait_on_device()
        self._rest.wait()


def bring(shard: Tensor, own: Tensor, *, then: Callable[[], Pending]) -> Pending:
    """Begin to copy `shard` to `own`, [n] each, and to send it to others, as `then` does."""
    return _Brought(Arrival(shard, own), then)


def to_host(tensor: Tensor, *, pin_memory: bool) -> Tensor:
    """Return a copy in host memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin_memory).copy_(tensor)


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _STREAMS[device]
