"""Lion with fused kernels."""

from __future__ import annotations

from ..runtime.optimizers.lion import DeepSpeedCPULion, FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
