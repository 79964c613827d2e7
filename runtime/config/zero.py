"""zero_optimization: what is sharded, and in which portions it travels."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .section import Section
from .value import Count, Texts

STAGES = (0, 1, 2, 3)


def _read_stage(value: Any) -> int:
    if isinstance(value, bool) or value not in STAGES:
        raise ValueError("is not a ZeRO stage; there are 0, 1, 2 and 3")
    return int(value)


class LeafModuleConfig(Section):
    """Modules whose parameters are gathered as one at stage 3, whatever is inside; see `zero.set_z3_leaf_modules`."""

    classes: Texts = ()
    names: Texts = ()
    name_suffixes: Texts = ()


class ZeroConfig(Section):
    """ZeRO: stage 0 shards nothing, 1 the optimizer states, 2 the gradients too, 3 the parameters too."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_read_stage)] = 0
    reduce_bucket_numel: Count = Field(default=500_000_000, alias="reduce_bucket_size")
    """Elements (not bytes) that are reduced together."""
    prefetch_bucket_numel: Count = Field(default=50_000_000, alias="stage3_prefetch_bucket_size")
    """Elements that are gathered together, at stage 3."""
    leaf_module: LeafModuleConfig = LeafModuleConfig()
