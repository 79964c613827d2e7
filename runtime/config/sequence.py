"""sequence: how the gradients of ranks that share samples are put together."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from .keys.value import choice
from .section import Section

_GRADIENT = choice("mean", "sum")


class SequenceConfig(Section):
    """Settings of jobs with sequence_parallel_size above 1."""

    gradient: Annotated[str, BeforeValidator(_GRADIENT.read)] = "mean"
    """"mean": gradients are averaged over all ranks; "sum": added over ranks that share samples, and averaged
    over the others; "mean" if left out, but "sum" at stages 0 to 2 for programs that import deepspeed; ours,
    not DeepSpeed's"""
