"""pipeline: how a model in stages is run."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from .keys.value import Count, Positive, choice
from .section import Section

_WHEN = choice("batch", "micro_batch")
_SCHEDULE = choice("1f1b", "gpipe", "interleaved", "zero_bubble", "zbv", "dualpipev")


class PipelineConfig(Section):
    """Settings of a PipelineModule; they have no effect on another model."""

    schedule: Annotated[str | None, BeforeValidator(_SCHEDULE.read)] = None
    """the order of forwards and backwards: "1f1b" or "gpipe"; the others put several stages on a rank, so the
    PipelineModule is built for them"""
    stages_per_rank: Positive | None = None
    """must be what the PipelineModule was built with"""
    activation_checkpoint_interval: Count = 0
    """of so many layers the inputs alone are kept; 0, as if left out: what the PipelineModule says"""
    reduce: Annotated[str, BeforeValidator(_WHEN.read)] = "batch"
    """when stages 2 and 3 average gradients: "batch", once for a step, so a rank has whole gradients of its
    stages meanwhile; "micro_batch", in each backward, so it has shards"""
    unshard: Annotated[str, BeforeValidator(_WHEN.read)] = "batch"
    """how long stage 3 has parameters whole: "batch", from the first micro batch to the last; "micro_batch",
    for each use"""
