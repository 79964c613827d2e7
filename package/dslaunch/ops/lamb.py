"""LAMB with fused kernels."""

from __future__ import annotations

from ..runtime.optimizers.lamb import FusedLamb

__all__ = ["FusedLamb"]
