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
    """Options of save_checkpoint() beside writing."""

    tag_validation: Annotated[str, BeforeValidator(_TAG_VALIDATION.read)] = "Warn"
    """rank 0's tag is taken; where another rank gives another one, Warn warns, Fail is an error; Warn if left
    out"""
    async_save: Bool = False
    """save_checkpoint() returns when training may go on, and files are written meanwhile; off if left out"""
    preemption_save_dir: Annotated[str | None, BeforeValidator(_text_or_none)] = None
    """after a SIGTERM to any rank, the step that follows saves a checkpoint in this folder and ends with exit
    code 143, or with 75 where the job is to have other hosts; if left out, SIGTERM ends at once, and a job
    whose hosts change ends after the next checkpoint that the program saves"""
    keep_last: Positive | None = None
    """so many checkpoints stay in a folder, older ones are removed; all if left out"""
    use_node_local_storage: Bool = False
    """on one host any folder will do; where ranks are on several, a warning says that all must see it"""
