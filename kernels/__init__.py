"""Fused optimizer arithmetic over flat shards in host memory. No torch, no numpy: arrays arrive through DLPack."""

from .adam import AdamSegment, adamw_step, adamw_step_reference, squared_norm

__all__ = ["AdamSegment", "adamw_step", "adamw_step_reference", "squared_norm"]
