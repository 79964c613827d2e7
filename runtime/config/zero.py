"""zero_optimization: what is sharded, and in which portions it travels."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .section import Section
from .value import Count

AVAILABLE_STAGES = (0, 1, 2)
_KNOWN_STAGES = (0, 1, 2, 3)


def _read_stage(value: Any) -> int:
    if isinstance(value, bool) or value not in _KNOWN_STAGES:
        raise ValueError("is not a ZeRO stage; 0, 1 and 2 are available")
    if value not in AVAILABLE_STAGES:
        raise ValueError("is not available in this version; 0, 1 and 2 are")
    return int(value)


class ZeroConfig(Section):
    """ZeRO: stage 0 shards nothing, stage 1 the optimizer states, stage 2 the gradients too."""

    stage: Annotated[Literal[0, 1, 2], BeforeValidator(_read_stage)] = 0
    reduce_bucket_numel: Count = Field(default=500_000_000, alias="reduce_bucket_size")
    """Elements (not bytes) that are reduced together."""
