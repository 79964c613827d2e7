"""A checkpoint that the run as configured has loaded before its first step, for the plain run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from ..engine.base import EngineBase
from ..environment import CONFIGURED
from .recorder import Recorder

Result = tuple[str | None, dict[str, Any] | None]  # what load_checkpoint() returns


def write_loaded(engine: EngineBase, recorder: Recorder, result: Result) -> None:
    """Keep what load_checkpoint() has returned, and what it has changed beside weights and states."""
    scheduler, optimizer = engine.lr_scheduler, engine.optimizer
    loaded = {
        "result": result,
        "progress": asdict(engine._progress),
        "num_steps": 0 if optimizer is None else optimizer.num_steps,
        "groups": [] if optimizer is None else optimizer.state_dict()["param_groups"],
        "scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
        "scale": engine._scaler.scale,
    }
    torch.save(loaded, f"{recorder.path_of(CONFIGURED, 0)}.loaded")


def read_loaded(recorder: Recorder) -> dict[str, Any]:
    """Return what the other run has kept on this rank.

    Errors: OSError if it has loaded nothing at this place of the program
    """
    path = f"{recorder.path_of(CONFIGURED, 0)}.loaded"
    # the program's own values, written by this program a moment ago
    loaded: dict[str, Any] = torch.load(path, weights_only=False)
    return loaded


def take_loaded(engine: EngineBase, loaded: dict[str, Any]) -> None:
    """Set what is beside weights and states as the other run has loaded it."""
    for name, value in loaded["progress"].items():
        setattr(engine._progress, name, value)
    if engine.optimizer is not None:
        engine.optimizer.num_steps = loaded["num_steps"]
        for group, values in zip(engine.optimizer.param_groups, loaded["groups"], strict=True):
            group.update(values)
    if loaded["scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(loaded["scheduler"])
