"""Adam and AdamW with fused kernels."""

from __future__ import annotations

from ..runtime.optimizers.adam import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
