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
    """where the parameters lie between their uses, at stage 3: none (or left out), cpu or nvme; cpu has no
    effect where the run is on CPUs"""
    nvme_path: Annotated[str | None, BeforeValidator(_text_or_none)] = None
    """a folder on a local disk, for nvme"""
    pin_memory: Bool = True
    """page-locked host memory, which a GPU copies faster, for cpu; true if left out"""

    @property
    def is_on(self) -> bool:
        """Whether anything leaves the device."""
        return self.device != "none"

    def fault(self, path: str) -> str | None:
        """Return the conflict in the section at `path`; None if there is none."""
        if self.device == "nvme" and not self.nvme_path:
            return f'{path}.device "nvme" needs {path}.nvme_path, a folder on a local disk'
        return None


class DelayedUpdateConfig(Section):
    """The step beside the forward and backward after it, which see parameters from before
    it: other numbers.
    """

    enabled: Bool = False
    """true: the update runs beside the next forward and backward, which changes the numbers, for cpu at
    stages 2 and 3; false if left out"""
    warmup_steps: Count = 40
    """steps at the beginning that are not delayed; 40 if left out"""


class OffloadOptimizerConfig(OffloadParamConfig):
    """Optimizer states, with the float32 masters of parameters of 16 bits."""

    device: Annotated[str, BeforeValidator(DEVICE.read)] = "none"
    """where optimizer states and float32 masters lie, at stages 1 to 3: none (or left out), cpu or nvme; cpu
    has no effect where the run is on CPUs"""
    ratio: Ratio = 1.0
    """share of the trained elements whose states leave the device, for cpu; 1 if left out"""
    super_offload: Bool = False
    """true: units are updated during backward, with the same numbers, for cpu at stages 2 and 3; false if
    left out"""
    delayed_update: DelayedUpdateConfig = DelayedUpdateConfig()

    def fault(self, path: str) -> str | None:
        """Return the conflict in the section at `path`; None if there is none."""
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
    """Settings for reading and writing files on a local disk."""

    block_bytes: Annotated[int, BeforeValidator(_block_bytes)] = Field(
        default=1024 * 1024, alias="block_size"
    )
    """with NVMe, bytes of one read or write; 1048576 if left out"""
    queue_depth: Positive = 8
    """with NVMe, times thread_count: reads and writes under way at once, 64 at most; 8 if left out"""
    thread_count: Positive = 1
    """see queue_depth; 1 if left out"""

    @property
    def num_threads(self) -> int:
        """Requests under way at once, each of which has a thread of its own here."""
        return min(self.queue_depth * self.thread_count, _MAX_THREADS)
