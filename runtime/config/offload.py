"""zero_optimization.offload_optimizer and offload_param, and aio: what leaves the memory of the device
that computes, and how.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from .keys.value import POSITIVE, TEXT, Bool, Count, Positive, Ratio, choice
from .section import Section

_MAX_THREADS = 64  # more under way than any disk has queues for

DEVICE = choice("none", "cpu", "nvme")


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(TEXT.read(value))


def _block_bytes(value: Any) -> int:
    if not POSITIVE.accepts(value) or not _is_block(int(value)):
        raise ValueError("is not a power of two from 4096 to 1073741824")
    return int(value)


def _is_block(nbytes: int) -> bool:
    return 4096 <= nbytes <= 2**30 and nbytes & (nbytes - 1) == 0


class OffloadParamConfig(Section):
    """At stage 3, the parameters between their uses."""

    device: Annotated[str, BeforeValidator(DEVICE.read)] = "none"
    nvme_path: Annotated[str | None, BeforeValidator(_text_or_none)] = None
    """A folder on a local disk."""
    pin_memory: Bool = True
    """Where the run is on GPUs."""

    @property
    def is_on(self) -> bool:
        """Whether anything leaves the device."""
        return self.device != "none"

    def fault(self, path: str) -> str | None:
        """What does not go together in the section at `path`; None if all does."""
        if self.device == "nvme" and not self.nvme_path:
            return f'{path}.device "nvme" needs {path}.nvme_path, a folder on a local disk'
        return None


class DelayedUpdateConfig(Section):
    """The step beside the forward and backward after it, which see parameters from before
    it: other numbers.
    """

    enabled: Bool = False
    warmup_steps: Count = 40
    """Steps that are made at once, at the beginning."""


class OffloadOptimizerConfig(OffloadParamConfig):
    """Optimizer states, with the float32 masters of parameters of 16 bits."""

    ratio: Ratio = 1.0
    """Share of the trained elements whose states leave the device."""
    super_offload: Bool = False
    """Whether sub-buffers are updated during backward; the same numbers."""
    delayed_update: DelayedUpdateConfig = DelayedUpdateConfig()

    def fault(self, path: str) -> str | None:
        """As that of the parameters."""
        if self.device == "nvme" and self.ratio != 1.0:
            return f'{path}.ratio {self.ratio:g} is for device "cpu"; leave it out, or write 1'
        delayed = self.delayed_update.enabled
        if self.super_offload and delayed:
            return (
                f"{path}.super_offload true and delayed_update.enabled true are two times for the "
                "same step; keep super_offload for the numbers of a run without either, "
                "delayed_update for the shortest step"
            )
        if (self.super_offload or delayed) and self.device != "cpu":
            key = "super_offload" if self.super_offload else "delayed_update.enabled"
            return (
                f'{path}.{key} true is for device "cpu", not "{self.device}"; write that device, or leave '
                "the key out"
            )
        if delayed and self.ratio != 1.0:
            return (
                f"{path}.ratio {self.ratio:g} would delay a part of the step only; write 1, or "
                "leave delayed_update out"
            )
        return super().fault(path)


class AioConfig(Section):
    """How files on a local disk are read and written."""

    block_bytes: Annotated[int, BeforeValidator(_block_bytes)] = Field(
        default=1024 * 1024, alias="block_size"
    )
    """Bytes of one request to the system."""
    queue_depth: Positive = 8
    """Requests of one thread of DeepSpeed's that are under way at once; here each has a thread of its own."""
    thread_count: Positive = 1

    @property
    def num_threads(self) -> int:
        """Requests under way at once."""
        return min(self.queue_depth * self.thread_count, _MAX_THREADS)
