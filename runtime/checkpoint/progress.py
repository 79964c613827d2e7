"""How far training has got."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class Progress:
    """The engine's counters, as DeepSpeed counts them.

    Units: micro_steps counts micro batches, global_steps optimizer steps, the skipped ones among them
    """

    micro_steps: int = 0
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return what a checkpoint keeps."""
        return asdict(self)

    def become(self, other: Progress) -> None:
        """Take all counters of another one."""
        for name, value in asdict(other).items():
            setattr(self, name, value)

    def restore(self, saved: dict[str, Any], *, gradient_accumulation_steps: int) -> None:
        """Take a checkpoint's counters; accumulation starts afresh, as its gradients are not saved."""
        self.global_steps = int(saved["global_steps"])
        self.global_samples = int(saved["global_samples"])
        self.skipped_steps = int(saved["skipped_steps"])
        self.micro_steps = self.global_steps * gradient_accumulation_steps
