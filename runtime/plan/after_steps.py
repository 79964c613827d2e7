"""An evaluation, a save, a load and a generation, as runs do them beside steps; each has peaks of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..checkpoint.files.tensor_runs import SubBufferRuns, TensorRuns
from ..checkpoint.files.writer import boxes_on_host
from ..checkpoint.save import PreparedSave
from ..engine.base import EngineBase
from ..engine.generating import Generating
from ..engine.stages_engine import StagesEngine
from ..engine.step_engine import StepEngine
from ..placement.generation_plan import Generation
from .memory import RunMemory
from .planned_checkpoint import ANY_TAG, LOAD

EVALUATE, SAVE, GENERATE = "evaluation", "saving a checkpoint", "generation"


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
    sub_buffers = (sub_buffer for unit in engine._model.units for sub_buffer in unit.sub_buffers)
    return _bring_to_host(SubBufferRuns(one).to_write(left_out=frozenset()) for one in sub_buffers)


def plan_generations(memory: RunMemory) -> None:
    """Have the blocks in which the program generates be a phase of their own."""
    plain = Generating.block

    @contextmanager
    def block(generating: Generating, **options: Any) -> Iterator[Generation]:
        before = memory.phases[-1].name
        memory.begin(GENERATE)
        try:
            with plain(generating, **options) as generation:
                yield generation
        finally:
            memory.begin(before)

    generating_class: Any = Generating
    generating_class.block = block


def plan_saves(memory: RunMemory) -> None:
    """Have the program's saves bring their tensors to host memory, and write none: the other ranks, which
    tell rank 0 what they have written, are not there.
    """

    def write(prepared: PreparedSave) -> None:
        """Bring this rank's part to host memory; beside training that has no phase of its own."""
        is_alone = threading.current_thread() is threading.main_thread()
        before = memory.phases[-1].name
        if is_alone:
            memory.begin(SAVE)
        _bring_to_host(prepared.all_runs)
        if is_alone:
            memory.begin(before)

    prepared_class: Any = PreparedSave
    prepared_class.write = write


def _bring_to_host(all_runs: Iterable[TensorRuns]) -> int:
    """Return the bytes."""
    num_bytes = 0
    for tensor_runs in all_runs:
        if tensor_runs.runs:
            with tensor_runs.here(False):
                for _, box, values in boxes_on_host(tensor_runs, tensor_runs.flats()):
                    num_bytes += box.numel * values.itemsize
    return num_bytes


def rehearse_load(engine: EngineBase, memory: RunMemory) -> None:
    """Load a checkpoint as this job saves it; see planned_checkpoint.py."""
    memory.begin(LOAD)
    engine.load_checkpoint(os.devnull, tag=ANY_TAG)
