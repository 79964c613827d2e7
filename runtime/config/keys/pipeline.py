"""A model in stages."""

from __future__ import annotations

from .key import hint
from .value import ANY, BOOL

_SECTION = "pipeline"

PIPELINE = (
    hint(f"{_SECTION}.stages", ANY, "the PipelineModule says how many there are"),
    hint(f"{_SECTION}.partition", ANY, "the PipelineModule's partition_method counts"),
    hint(f"{_SECTION}.seed_layers", BOOL, "the PipelineModule's seed_layers counts"),
    hint(f"{_SECTION}.pipe_partitioned", BOOL, "what goes between stages is sent whole"),
    hint(f"{_SECTION}.grad_partitioned", BOOL, "what goes between stages is sent whole"),
    hint(f"{_SECTION}.use_reentrant", BOOL, "activations are checkpointed without a backward inside it"),
)
