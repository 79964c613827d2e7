"""An evaluation and a save, as runs do them between their steps; both have peaks of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..checkpoint.files.tensor_runs import SubBufferRuns
from ..checkpoint.files.writer import boxes_on_host
from ..engine.base import EngineBase
from ..engine.stages_engine import StagesEngine
from ..engine.step_engine import StepEngine
from .memory import RunMemory

EVALUATE, SAVE = "evaluation", "saving a checkpoint"


def rehearse_evaluation(
    engine: EngineBase, arguments: tuple[tuple[Any, ...], Mapping[str, Any]], memory: RunMemory
) -> None:
    """Run the last step's forward once more, without gradients; of a model in stages, its last batch."""
    memory.begin(EVALUATE)
    args, kwargs = arguments
    if isinstance(engine, StagesEngine):
        engine.eval_batch(*args, **kwargs)
        engine.module.train()
    elif isinstance(engine, StepEngine):
        engine.eval()
        with torch.no_grad():
            engine(*args, **kwargs)
        engine.train()


def rehearse_save(engine: EngineBase, memory: RunMemory) -> int:
    """Bring this rank's part of a checkpoint to host memory, as a save does; return its bytes."""
    memory.begin(SAVE)
    num_bytes = 0
    for unit in engine._model.units:
        for sub_buffer in unit.sub_buffers:
            runs = SubBufferRuns(sub_buffer).to_write(left_out=frozenset())
            with runs.here(False):
                for _, box, values in boxes_on_host(runs, runs.flats()):
                    num_bytes += box.numel * values.itemsize
    return num_bytes
