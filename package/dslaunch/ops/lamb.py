"""LAMB with fused kernels."""

from __future__ import annotations

from ..runtime.ops.lamb import FusedLamb

__all__ = ["FusedLamb"]
