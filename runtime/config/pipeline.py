"""pipeline: how a model in stages is run."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from .keys.value import Count, Positive, choice
from .section import Section

_WHEN = choice("batch", "micro_batch")
_SCHEDULE = choice("1f1b", "gpipe", "interleaved", "zero_bubble", "zbv", "dualpipev")


class PipelineConfig(Section):
    """For a PipelineModule; nothing of it touches another model."""

    schedule: Annotated[str | None, BeforeValidator(_SCHEDULE.read)] = None
    """None: the module's."""
    stages_per_rank: Positive | None = None
    activation_checkpoint_interval: Count = 0
    """Layers whose inputs alone are kept; 0: what the module says."""
    reduce: Annotated[str, BeforeValidator(_WHEN.read)] = "batch"
    """When stages 2 and 3 average gradients."""
    unshard: Annotated[str, BeforeValidator(_WHEN.read)] = "batch"
    """How long stage 3 has parameters whole."""
