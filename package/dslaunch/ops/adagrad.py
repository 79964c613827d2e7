"""Adagrad with fused kernels."""

from __future__ import annotations

from ..runtime.optimizers.adagrad import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
