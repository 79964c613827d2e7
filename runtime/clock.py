"""Times of the parts of a step, for `wall_clock_breakdown`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class Clock:
    """Clock that adds up times by name; a clock that is off costs nothing.

    At the beginning and end of each measurement it waits for the GPU, which costs some speed.
    """

    def __init__(self, *, is_on: bool, device: torch.device) -> None:
        self.is_on = is_on
        self._device = device
        self._times_s: dict[str, float] = {}

    def time(self, name: str) -> AbstractContextManager[None]:
        """Add the time of the block to the times of this name."""
        return self._measured(name) if self.is_on else nullcontext()

    def take(self) -> str:
        """Return all times since the last call, as "forward 1.2 ms, backward 3.4 ms"; "" if the
        clock is off.
        """
        return show_times(self.take_times_s())

    def take_times_s(self) -> dict[str, float]:
        """Return all times since the last call, by name, in seconds."""
        times_s, self._times_s = self._times_s, {}
        return times_s

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


def show_times(times_s: dict[str, float]) -> str:
    """Return the times as one line of text."""
    return ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in times_s.items())


def wait_for_device() -> None:
    """Block until the GPU of this process, if it uses one, has done all queued work."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
