"""checkpoint: how engine.save_checkpoint() saves."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from .section import Section
from .value import Bool, Positive, choice

_TAG_VALIDATION = choice("Ignore", "Warn", "Fail")


class CheckpointConfig(Section):
    """What save_checkpoint() does beside writing."""

    tag_validation: Annotated[str, BeforeValidator(_TAG_VALIDATION.read)] = "Warn"
    """What happens if ranks give different tags; rank 0's is taken."""
    async_save: Bool = False
    """Return when the values are safe from the next step, and write while training goes on."""
    keep_last: Positive | None = None
    """So many checkpoints stay in the folder; older ones are removed when a new one is there."""
