"""Optimizers with fused kernels, for training loops with or without the engine."""
