"""A number that a GPU is still computing."""

from __future__ import annotations

import torch
from torch import Tensor


class DeviceNumber:
    """A copy on its way to host memory. Nothing waits for it."""

    def __init__(self, tensor: Tensor) -> None:
        """Shapes: [], on a GPU"""
        self._host = torch.empty((), dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(tensor.device))

    def poll(self) -> float | None:
        """Return it once it is here."""
        return float(self._host) if self._event.query() else None  # type: ignore[no-untyped-call]
