"""The training loop of a plan that has a model and its batches in place of a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..compat.engine.initialize import initialize
from .program import NUM_STEPS


def train(model: torch.nn.Module, make_batch: Callable[[], Any], config: Any) -> None:
    """Train until the planned steps have ended.

    `make_batch()` returns what the model's forward takes: a dict of keyword arguments, a tuple, or one
    tensor. The loss is the forward's result, its `loss`, or its first element.
    """
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(NUM_STEPS * engine.gradient_accumulation_steps()):
        batch = _on(engine.device, make_batch())
        loss = _loss_of(_forward(engine, batch))  # what else a forward returns is freed before the backward
        engine.backward(loss)
        engine.step()


def _forward(engine: Any, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return engine(**batch)
    return engine(*batch) if isinstance(batch, (tuple, list)) else engine(batch)


def _loss_of(result: Any) -> Any:
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if loss is not None:
        return loss
    return result[0] if isinstance(result, (tuple, list)) else result


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _on(device, one) for key, one in value.items()}
    return type(value)(_on(device, one) for one in value) if isinstance(value, (tuple, list)) else value
