"""A model that generates with all of its parameters here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from ..engine.step_engine import StepEngine
from ..zero.gathered_parameters import GatheredParameters

M = TypeVar("M", bound=nn.Module)


@contextmanager
def unwrap_model_for_generation(model: M) -> Iterator[M]:
    """Inside the block every rank has the engine's parameters whole, to be read: generating many tokens
    gathers them once.

    Hooks have nothing to gather or free meanwhile, so each rank may run the model as often as it likes. Works
    at every stage. After the block, on errors too, parameters are sharded as before. With an engine this is
    its block `generating(weights="whole")`.
    Order:  a collective at both ends
    Source: DeepSpeed 0.19.8 runtime/zero/stage3.py, `unwrap_model_for_generation`
    """
    here = (
        StepEngine.generating(model, weights="whole")
        if isinstance(model, StepEngine)
        else GatheredParameters(model.parameters())
    )
    with here:
        yield model
