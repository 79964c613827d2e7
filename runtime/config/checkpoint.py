"""checkpoint: how engine.save_checkpoint() saves."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from .keys.value import TEXT, Bool, Positive, choice
from .section import Section

_TAG_VALIDATION = choice("Ignore", "Warn", "Fail")


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(TEXT.read(value))


class CheckpointConfig(Section):
    """What save_checkpoint() does beside writing."""

    tag_validation: Annotated[str, BeforeValidator(_TAG_VALIDATION.read)] = "Warn"
    """What happens if ranks give different tags; rank 0's is taken."""
    async_save: Bool = False
    """Return when the values are safe from the next step, and write while training goes on."""
    keep_last: Positive | None = None
    """So many checkpoints stay in the folder; older ones are removed when a new one is there."""
    use_node_local_storage: Bool = False
    """Whether the program asks that each host keep its own ranks' files, which is so on one host."""
    preemption_save_dir: Annotated[str | None, BeforeValidator(_text_or_none)] = None
    """On SIGTERM, the next step saves here, and ends."""
