"""The keys that DeepSpeed 0.19.8 has removed: it refuses them, even where they are switched off."""

from __future__ import annotations

# Source: DeepSpeed 0.19.8 runtime/config.py, `_REMOVED_TOP_LEVEL_CONFIG_KEYS` and `_REMOVED_ZERO_CONFIG_KEYS`.
REMOVED = (
    "amp",
    "compression_training",
    "curriculum_learning",
    "eigenvalue",
    "elasticity",
    "graph_harvesting",
    "nebula",
    "progressive_layer_drop",
    "quantize_training",
    "sparse_attention",
    "sparse_gradients",
    "zero_optimization.mics_hierarchical_params_gather",
    "zero_optimization.mics_shard_size",
    "zero_optimization.zeropp_loco_param",
)


def is_removed(path: str) -> bool:
    """Whether the dotted `path` is one of them, or inside one."""
    return any(f"{path}.".startswith(f"{removed}.") for removed in REMOVED)
