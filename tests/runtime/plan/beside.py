"""A program's steps as the plan predicts them, and as they are on the fake device."""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from dslaunch.drop_in import FOLDER
from dslaunch.shared.axes import Axes
from tests.runtime.plan.programs import Config
from tests.runtime.plan.public_models import program_of

PLANNED_STEPS = 2
MOST_ROUNDS = 5  # of rehearsals of all ranks of a pipeline, with two stages on each at most
DEVICE_BYTES = 2**30
_PRELOADED = ["tests.runtime.plan.preloaded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One rank's first steps.

    Units: bytes. `peaks` and `sent` (by kind of collective) have an entry for each step, `pinned` is the most
           of the whole run
    """

    peaks: tuple[int, ...]
    pinned: int
    sent: tuple[dict[str, int], ...]
    problem: str = ""
    num_params: tuple[int, int] = (0, 0)  # of the model, and of its largest layer; where it was run


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One program in one layout."""

    program: str
    layout: str
    config: Config
    world_size: int = 2
    rank: int = 0

    @property
    def name(self) -> str:
        ranks = "" if self.world_size == 2 else f", {self.world_size} ranks"
        rank = "" if self.rank == 0 else f", rank {self.rank}"
        return f"{self.program}, {self.layout}{ranks}{rank}"


class Ended(BaseException):
    """The measured steps are done."""


def predict(row: Row) -> Seen:
    """Return what a rehearsal says of the steps."""
    return seen_of(answer_of_row(row))


def answer_of_row(row: Row) -> dict[str, Any]:
    """Return the answer of a rehearsal. Where it waits for what stages of other ranks tell, these are
    rehearsed before it, in turn.
    """
    told: dict[str, Any] = {}
    answer = in_own_process(row, row.rank, told)
    mesh = {name: size for name, size in (answer["mesh"] or {}).items() if name != "ep"}
    line = Axes(**mesh).line_of(row.rank, ("pp",)) if mesh else (row.rank,)
    for rank in line * MOST_ROUNDS if answer["waits_for"] else ():
        answer = in_own_process(row, rank, told)
        told |= answer["told"]
        if rank == row.rank and not answer["waits_for"]:
            break
    return answer


def in_own_process(row: Row, rank: int, told: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of the rehearsal of a rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    pool = ProcessPoolExecutor(1, context)
    try:
        return pool.submit(_rehearsed, row, rank, told).result(timeout=60)
    except TimeoutError:
        for process in pool._processes.values():
            process.kill()
        raise
    finally:
        pool.shutdown()


def seen_of(answer: dict[str, Any]) -> Seen:
    """Return what the answer of a rehearsal says of the steps."""
    problem = answer["problem"]
    names = [one["name"] for one in answer["phases"]]
    last = max((place for place, name in enumerate(names) if name.startswith("step")), default=0)

    def most(place: str, prefix: str) -> int:
        found = [
            one["peaks"][place]["bytes"]
            for one in answer["phases"][: last + 1]  # a plan goes on to evaluate and save
            if one["name"].startswith(prefix) and place in one["peaks"]
        ]
        return max(found, default=0)

    sent = []
    for step in answer["steps"]:
        kinds: dict[str, int] = {}
        for one in step["sent"]:
            for kind, nbytes in one["bytes"].items():
                kinds[kind] = kinds.get(kind, 0) + nbytes
        sent.append(kinds)
    return Seen(
        peaks=tuple(most("device", f"step {number}:") for number in range(1, PLANNED_STEPS + 1)),
        pinned=most("pinned", ""),
        sent=tuple(sent),
        problem="" if problem is None else f"{problem['why']} ({problem['line']})",
    )


def _rehearsed(row: Row, rank: int, told: dict[str, Any]) -> dict[str, Any]:
    import torch

    from dslaunch.runtime.plan.answer import answer_of
    from dslaunch.runtime.plan.program import Rehearsal

    os.environ.update(environment(rank, row.world_size))
    sys.path.insert(0, FOLDER)  # where programs find `deepspeed`
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    rehearsal = Rehearsal(
        device=torch.device("cuda", 0),
        device_bytes=DEVICE_BYTES,
        rank=rank,
        world_size=row.world_size,
        has_fused_attention=False,  # the fake device has none
        told=told,
    )
    rehearsal.run(lambda: program_of(row.program)(row.config))
    return answer_of(rehearsal)


def environment(rank: int, world_size: int) -> dict[str, str]:
    """Return the variables that a launcher sets for a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "OMP_NUM_THREADS": "1",
    }


def measure(rank: int, row: Row) -> Seen:
    """Run on the fake device; for a process of `cuda_ranks` that has run nothing else."""
    import torch

    os.environ.update(environment(rank, row.world_size), LOCAL_RANK=str(rank))
    sys.path.insert(0, FOLDER)
    watch = _Watch(rank)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program_of(row.program)(row.config)
        except Ended:
            return watch.seen()
    raise AssertionError(f"{row.name} has ended before its second step")


class _Watch:
    """The device's counters, read where an engine's steps begin and end."""

    def __init__(self, rank: int) -> None:
        from dslaunch.runtime.engine.base import EngineBase
        from dslaunch.runtime.engine.stages_engine import StagesEngine
        from dslaunch.runtime.engine.step_engine import StepEngine
        from tests.fake_cuda.torch_cuda import device

        self._native, self._rank = device(), rank
        self._peaks: list[int] = []
        self._pinned = 0
        self._num_params = (0, 0)
        self._sent: list[dict[str, int]] = []
        self._before: dict[str, int] = {}
        self._has_begun = False
        self._at_begin(StepEngine, "forward")
        self._at_begin(StagesEngine, "train_batch")
        plain = EngineBase._end_micro_batch

        def ended(engine: Any, *args: Any, **kwargs: Any) -> None:
            steps = _num_steps(engine)
            plain(engine, *args, **kwargs)
            if _num_steps(engine) > steps:
                self._end_step(engine)

        EngineBase._end_micro_batch = ended  # type: ignore[method-assign]

    def _at_begin(self, kind: Any, name: str) -> None:
        plain: Callable[..., Any] = getattr(kind, name)

        def begun(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._has_begun:
                self._has_begun = True
                self._before = engine._wire.meter.bytes_by_kind()
                self._begin_step()
            elif len(self._peaks) < len(self._sent):
                self._note_peak()
                self._begin_step()
            return plain(engine, *args, **kwargs)

        setattr(kind, name, begun)

    def _begin_step(self) -> None:
        self._pinned = max(self._pinned, self._memory()["peak_pinned"])
        self._native.reset_peaks(self._rank)

    def _note_peak(self) -> None:
        memory = self._memory()
        self._peaks.append(memory["peak"])
        self._pinned = max(self._pinned, memory["peak_pinned"])

    def _memory(self) -> dict[str, int]:
        found: dict[str, int] = self._native.memory(self._rank)
        return found

    def _end_step(self, engine: Any) -> None:
        now = engine._wire.meter.bytes_by_kind()
        self._num_params = _num_params(engine.module)
        step = {kind: nbytes - self._before.get(kind, 0) for kind, nbytes in now.items()}
        self._sent.append({kind: nbytes for kind, nbytes in step.items() if nbytes})
        self._before = now
        if len(self._sent) == PLANNED_STEPS:
            self._note_peak()
            raise Ended

    def seen(self) -> Seen:
        """Return what was counted."""
        return Seen(
            peaks=tuple(self._peaks),
            pinned=self._pinned,
            sent=tuple(self._sent),
            num_params=self._num_params,
        )


def _num_params(model: Any) -> tuple[int, int]:
    own = [sum(one.numel() for one in part.parameters(recurse=False)) for part in model.modules()]
    return sum(one.numel() for one in model.parameters()), max(own)


def _num_steps(engine: Any) -> int:
    return int(engine._progress.global_steps + engine._progress.skipped_steps)
