"""How long each forward of a module takes."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


class ForwardTimes:
    """The times of a module's forwards, on its device, since they were last taken."""

    def __init__(self, module: nn.Module, device: torch.device, *, by_events: bool) -> None:
        """`by_events`: let the GPU measure, without waiting for it before each forward."""
        self._device = device
        self._by_events = by_events and device.type == "cuda"
        self._times: list[Any] = []  # milliseconds, or pairs of events
        self._begun: list[Any] = []
        self._hooks = (
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end, always_call=True),
        )

    def take(self) -> list[float]:
        """Return the times, and forget them.

        Units: milliseconds
        """
        times, self._times = self._times, []
        if not self._by_events:
            return times
        torch.cuda.synchronize(self._device)
        return [begun.elapsed_time(ended) for begun, ended in times]

    def close(self) -> None:
        """Measure no more."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._begun.append(self._now())

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        begun, ended = self._begun.pop(), self._now()
        self._times.append((begun, ended) if self._by_events else (ended - begun) * 1e3)

    def _now(self) -> Any:
        if self._by_events:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            return event
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
