"""Numbers on their way between the host and a GPU, for which the host does not wait.

A copy from or to memory that is not pinned stops the host until the GPU has done all that it was told before.
These go through pinned memory, of which torch knows when a copy has read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def on_device(numbers: Sequence[float], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers as a tensor [n] on the device."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    pinned = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=True)
    return pinned.to(device, non_blocking=True)


class ReadBack:
    """Values on their way to host memory. On a CPU they are the tensor itself."""

    def __init__(self, values: Tensor) -> None:
        """Begin to copy them, after all that the current stream was told."""
        self._event: torch.cuda.Event | None = None
        self._host = values
        if values.is_cuda:
            self._host = torch.empty_like(values, device="cpu", pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.current_stream(values.device).record_event()

    @property
    def is_here(self) -> bool:
        """Whether `wait` would not block."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """Return the numbers in host memory."""
        if self._event is not None and not self.is_here:
            self._event.synchronize()
        return self._host


def aside(device: torch.device) -> AbstractContextManager[object]:
    """Let the GPU's work that is queued inside wait for no computation."""
    if device.type != "cuda":
        return nullcontext()
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(_STREAMS[device])


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
