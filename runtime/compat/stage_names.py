"""ZeRO's stages by their names.

Source: DeepSpeed 0.19.8 runtime/zero/config.py, of the same names and values
"""

from __future__ import annotations

from enum import Enum


class ZeroStageEnum(int, Enum):
    """Names of the stages: each shards what its name says, and all that the stages before it shard."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
