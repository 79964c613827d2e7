"""A load of a checkpoint on the fake device, between two steps."""

from __future__ import annotations

import os
import warnings
from typing import Any

import dslaunch
from tests.runtime.plan.beside import PLANNED_STEPS, Ended, Row, environment
from tests.runtime.plan.programs import Config
from tests.runtime.plan.public_models import program_of
from tests.runtime.plan.test_api import Stack


def measure_load(rank: int, row: Row, folder: str) -> int:
    """Return the device's peak in a load, before the first step behind the planned ones, of what was saved
    just before; for a process of `cuda_ranks` that has run nothing else.

    Units: bytes
    """
    import torch

    from dslaunch.runtime.engine.step_engine import StepEngine
    from tests.fake_cuda.torch_cuda import device

    os.environ.update(environment(rank, row.world_size), LOCAL_RANK=str(rank))
    native, peaks = device(), list[int]()
    plain = StepEngine.forward

    def forward(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if engine._progress.global_steps < PLANNED_STEPS:
            return plain(engine, *args, **kwargs)
        engine.save_checkpoint(folder)
        native.reset_peaks(rank)
        engine.load_checkpoint(folder)
        peaks.append(native.memory(rank)["peak"])
        raise Ended

    StepEngine.forward = forward  # type: ignore[method-assign]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program_of(row.program)(row.config)
        except Ended:
            return peaks[0]
    raise AssertionError(f"{row.name} has ended before its second step")


def save(rank: int, folder: str, config: Config) -> str:
    """Save a model that has done no step; return where."""
    engine, *_ = dslaunch.initialize(model=Stack(), config=config)
    engine.save_checkpoint(folder, tag="begun", client_state={"epoch": 3})
    return f"{folder}/begun"
