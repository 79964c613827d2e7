"""A program's steps on CPUs: what a plan says, and a census of the storages that are alive."""

from __future__ import annotations

import multiprocessing
import os
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from tests.runtime.plan.beside import DEVICE_BYTES, PLANNED_STEPS, Ended, Row
from tests.runtime.plan.programs import PROGRAMS


class Census(TorchDispatchMode):
    """Bytes of all storages of results of operations, and the most of them since the last reset."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.peak = 0

    def reset(self) -> None:
        """Begin the peak anew."""
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count."""
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and not is_traceable_wrapper_subclass(one):  # that has no memory
                storage = one.untyped_storage()
                self._alive[storage._cdata] = weakref.ref(storage)
        held = {key: ref() for key, ref in self._alive.items()}
        self._alive = {key: self._alive[key] for key, one in held.items() if one is not None}
        self.peak = max(self.peak, sum(one.nbytes() for one in held.values() if one is not None))
        return result


def measure_on_cpu(rank: int, row: Row) -> list[int]:
    """Return the peak of each step by the census; for a process of `ranks` that has run nothing else."""
    from dslaunch.runtime.engine.base import EngineBase
    from dslaunch.runtime.engine.step_engine import StepEngine

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(row.world_size))
    peaks: list[int] = []
    is_in_step = False
    forward, end = StepEngine.forward, EngineBase._end_micro_batch
    census = Census()

    def begun(engine: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_in_step
        if not is_in_step:
            is_in_step = True
            census.reset()
        return forward(engine, *args, **kwargs)

    def ended(engine: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal is_in_step
        before = engine._progress.global_steps
        end(engine, *args, **kwargs)
        if engine._progress.global_steps > before:
            is_in_step = False
            peaks.append(census.peak)
            if len(peaks) == PLANNED_STEPS:
                raise Ended

    StepEngine.forward, EngineBase._end_micro_batch = begun, ended  # type: ignore[method-assign]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with census:
                PROGRAMS[row.program](row.config)
        except Ended:
            return peaks
    raise AssertionError(f"{row.name} has ended before its second step")


def predict_on_cpu(row: Row) -> tuple[list[int], str]:
    """Return the peak of host memory in each step by a rehearsal, and its problem."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_rehearse, args=(row, theirs), daemon=True)
    process.start()
    theirs.close()
    if not ours.poll(300):
        process.kill()
        raise TimeoutError(row.name)
    answer = ours.recv()
    process.kill()  # what it would do at its end belongs to a run
    process.join()
    problem = answer["problem"]
    peaks = []
    for number in range(1, PLANNED_STEPS + 1):
        phases = [one["peaks"] for one in answer["phases"] if one["name"].startswith(f"step {number}:")]
        peaks.append(max((one["host"]["bytes"] for one in phases if "host" in one), default=0))
    return peaks, "" if problem is None else problem["why"]


def _rehearse(row: Row, pipe: Any) -> None:
    from dslaunch.runtime.plan.answer import answer_of
    from dslaunch.runtime.plan.program import Rehearsal

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(row.world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    warnings.simplefilter("ignore")
    rehearsal = Rehearsal(
        device=torch.device("cpu"),
        device_bytes=DEVICE_BYTES,
        rank=0,
        world_size=row.world_size,
    )
    rehearsal.run(lambda: PROGRAMS[row.program](row.config))
    pipe.send(answer_of(rehearsal))
