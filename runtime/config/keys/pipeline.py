"""A model in stages."""

from __future__ import annotations

from .key import hint, used
from .value import ANY, BOOL

_SECTION = "pipeline"

PIPELINE = (
    used(
        f"{_SECTION}.schedule",
        'the order of forwards and backwards: "1f1b" or "gpipe"; the others put several stages on a rank, so '
        "the PipelineModule is built for them",
    ),
    used(f"{_SECTION}.stages_per_rank", "must be what the PipelineModule was built with"),
    used(
        f"{_SECTION}.activation_checkpoint_interval",
        "of so many layers the inputs alone are kept; 0, as if left out: what the PipelineModule says",
    ),
    used(
        f"{_SECTION}.reduce",
        'when stages 2 and 3 average gradients: "batch", once for a step, so a rank has whole gradients of '
        'its stages meanwhile; "micro_batch", in each backward, so it has shards',
    ),
    used(
        f"{_SECTION}.unshard",
        'how long stage 3 has parameters whole: "batch", from the first micro batch to the last; '
        '"micro_batch", for each use',
    ),
    hint(f"{_SECTION}.stages", ANY, "the PipelineModule says how many there are"),
    hint(f"{_SECTION}.partition", ANY, "the PipelineModule's partition_method counts"),
    hint(f"{_SECTION}.seed_layers", BOOL, "the PipelineModule's seed_layers counts"),
    hint(f"{_SECTION}.pipe_partitioned", BOOL, "what goes between stages is sent whole"),
    hint(f"{_SECTION}.grad_partitioned", BOOL, "what goes between stages is sent whole"),
    hint(f"{_SECTION}.use_reentrant", BOOL, "activations are checkpointed without a backward inside it"),
)
