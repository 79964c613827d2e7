"""zero_optimization: what is sharded, and in which portions it travels."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .section import Section
from .value import Count

AVAILABLE_STAGES = (0, 1)
_KNOWN_STAGES = (0, 1, 2, 3)


def _read_stage(value: Any) -> int:
    if isinstance(value, bool) or value not in _KNOWN_STAGES:
        raise ValueError("is not a ZeRO stage; 0 and 1 are available")
    if value not in AVAILABLE_STAGES:
        raise ValueError("is not available in this version; 0 and 1 are")
    return int(value)


class ZeroConfig(Section):
    """ZeRO: stage 0 replicates the optimizer states, stage 1 shards them."""

    stage: Annotated[Literal[0, 1], BeforeValidator(_read_stage)] = 0
    reduce_bucket_numel: Count = Field(default=500_000_000, alias="reduce_bucket_size")
    """Elements (not bytes) that are reduced together."""
