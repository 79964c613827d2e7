"""`dslaunch.sequence`: the calls with which a program divides sequences over ranks."""

from __future__ import annotations

from .attention import DistributedAttention
from .hugging_face import UlyssesSPAttentionHF
from .loader import UlyssesSPDataLoaderAdapter
from .loss import mean_over_tokens, vocab_sequence_parallel_cross_entropy
from .parallel_state import (
    get_sequence_parallel_group,
    get_sequence_parallel_rank,
    get_sequence_parallel_world_size,
    initialize_sequence_parallel,
)
from .tiled import TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute

__all__ = [
    "DistributedAttention",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "initialize_sequence_parallel",
    "mean_over_tokens",
    "sequence_tiled_compute",
    "vocab_sequence_parallel_cross_entropy",
]
