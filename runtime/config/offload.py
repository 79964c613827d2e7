"""zero_optimization.offload_optimizer and offload_param, and aio: what leaves the memory of the device that computes, and how."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from .section import Section
from .value import TEXT, Bool, Positive, Ratio, choice

DEVICE = choice("none", "cpu", "nvme")


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(TEXT.read(value))


class OffloadParamConfig(Section):
    """At stage 3, the parameters between their uses."""

    device: Annotated[str, BeforeValidator(DEVICE.read)] = "none"
    nvme_path: Annotated[str | None, BeforeValidator(_text_or_none)] = None
    """A folder on a local disk."""
    pin_memory: Bool = False

    @property
    def is_on(self) -> bool:
        """Whether anything leaves the device."""
        return self.device != "none"

    def fault(self, path: str) -> str | None:
        """What does not go together in the section at `path`; None if all does."""
        if self.device == "nvme" and not self.nvme_path:
            return f'{path}.device "nvme" needs {path}.nvme_path, a folder on a local disk'
        return None


class OffloadOptimizerConfig(OffloadParamConfig):
    """Optimizer states, with the float32 masters of parameters of 16 bits."""

    ratio: Ratio = 1.0
    """Share of the trained elements whose states leave the device."""

    def fault(self, path: str) -> str | None:
        """As that of the parameters."""
        if self.device == "nvme" and self.ratio != 1.0:
            return f'{path}.ratio {self.ratio:g} is for device "cpu"; leave it out, or write 1'
        return super().fault(path)


class AioConfig(Section):
    """How files on a local disk are read and written."""

    block_bytes: Positive = Field(default=1024 * 1024, alias="block_size")
    """Bytes of one request to the system."""
    num_threads: Positive = Field(default=4, alias="thread_count")
    """Requests under way at once."""
