"""A load of a checkpoint on the fake device, between two steps."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any

import dslaunch
from tests.runtime.plan.beside import PLANNED_STEPS, Ended, Row, Seen, environment, measure
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


def save_trained(rank: int, row: Row, folder: str) -> None:
    """Save what a program has trained; for a process of `cuda_ranks` that has run nothing else."""
    from dslaunch.runtime.engine.base import EngineBase

    os.environ.update(environment(rank, row.world_size), LOCAL_RANK=str(rank))
    plain = EngineBase._end_micro_batch

    def ended(engine: Any, *args: Any, **kwargs: Any) -> None:
        plain(engine, *args, **kwargs)
        if engine._progress.global_steps:
            engine.save_checkpoint(folder)
            raise Ended

    EngineBase._end_micro_batch = ended  # type: ignore[method-assign]
    with warnings.catch_warnings(), contextlib.suppress(Ended):
        warnings.simplefilter("ignore")
        program_of(row.program)(row.config)


def measure_resumed(rank: int, row: Row) -> tuple[int, Seen]:
    """Return the device's peak in the load of a program that resumes, and its steps; as measure_load()."""
    from dslaunch.runtime.engine.base import EngineBase
    from tests.fake_cuda.torch_cuda import device

    native, peaks = device(), list[int]()
    plain = EngineBase.load_checkpoint

    def load(engine: Any, *args: Any, **kwargs: Any) -> Any:
        native.reset_peaks(rank)
        result = plain(engine, *args, **kwargs)
        assert result[0] is not None
        peaks.append(native.memory(rank)["peak"])
        return result

    EngineBase.load_checkpoint = load  # type: ignore[method-assign]
    seen = measure(rank, row)
    (peak,) = peaks
    return peak, seen


def save(rank: int, folder: str, config: Config) -> str:
    """Save a model that has done no step; return where."""
    engine, *_ = dslaunch.initialize(model=Stack(), config=config)
    engine.save_checkpoint(folder, tag="begun", client_state={"epoch": 3})
    return f"{folder}/begun"
