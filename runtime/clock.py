"""How long the parts of a step take, for `wall_clock_breakdown`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class Clock:
    """Adds up times by name; where it is off it costs nothing. A GPU is waited for at both ends, which costs some speed."""

    def __init__(self, *, is_on: bool, device: torch.device) -> None:
        self._is_on = is_on
        self._device = device
        self._times_s: dict[str, float] = {}

    def time(self, name: str) -> AbstractContextManager[None]:
        """Measure the block."""
        return self._measured(name) if self._is_on else nullcontext()

    def take(self) -> str:
        """All times since the last call, as "forward 1.2 ms, backward 3.4 ms"; empty where it is off."""
        shown = ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in self._times_s.items())
        self._times_s.clear()
        return shown

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        began = self._now()
        try:
            yield
        finally:
            self._times_s[name] = self._times_s.get(name, 0.0) + self._now() - began

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
