"""Runs a program without values until its second optimizer step has ended."""

from __future__ import annotations

import functools
import math
import os
import runpy
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch._dynamo

from ...kernels.compiled import _C
from ..engine.base import EngineBase
from ..engine.stages_engine import StagesEngine
from ..engine.step_engine import StepEngine
from ..errors import UserError
from ..mesh import parts
from ..step import copied_gradients, grad_norm
from .after_steps import (
    plan_generations,
    plan_saves,
    rehearse_evaluation,
    rehearse_load,
    rehearse_save,
)
from .attention import choose_attention
from .autocast import cast_as_autocast, cast_in_this_thread
from .by_device import choose_by_device
from .census import tell_kinds
from .cuda import PlannedGpu
from .device_numbers import take_device_numbers
from .disk import PlannedDisk
from .guesses import Guesses
from .memory import RunMemory
from .other_libraries import OtherLibraries
from .pinned import PlannedPages
from .planned_checkpoint import plan_loads
from .planned_weights import plan_loads_of_weights
from .ranks import join_alike_ranks
from .saved_tensors import plan_saved_tensors
from .stages import PlannedStages, UntoldInputError
from .storages import Storages
from .streams import host_waits
from .tensor_answers import answer_for_tensors
from .without_values import WithoutValues
from .work import RankWork, WorkMeter

NUM_STEPS = 2
BUILD, FORWARD, BACKWARD, STEP = "building the model", "forward", "backward", "optimizer step"


# What no tensor without values causes.
_IN_RUNS = (OSError, ImportError, SyntaxError, NameError, UnicodeError, KeyboardInterrupt)


class PlanEnded(BaseException):
    """The planned steps are done. No `except Exception` of the program stops it."""


class Obstacle(NamedTuple):
    """A line of the program that cannot be rehearsed."""

    line: str  # file and line of the program
    why: str
    is_in_runs: bool = False  # a run with values comes to it, too
    exit_code: int = 0  # the program's, if it ends by itself with another than 0 and has said why


_NO_ENGINE = Obstacle(
    "", "the program ends without a step of an engine; give one that calls initialize(), as programs of the "
    "Trainer do with --deepspeed", is_in_runs=True
)  # fmt: skip


class Rehearsal:
    """One process that runs a program as one rank of a job, without values and without the other ranks."""

    def __init__(
        self,
        *,
        device: torch.device,
        device_bytes: int,
        rank: int,
        world_size: int,
        has_fused_attention: bool = True,
        told: Mapping[str, Any] | None = None,
        holds_files_back: bool = False,
    ) -> None:
        """`has_fused_attention`: whether the device has the kernels that torch has for GPUs. `told`: what
        rehearsals of other ranks have told; see [Note: what stages tell each other]. `holds_files_back`: what
        the program writes into files is gone with the process.
        """
        self.device = device
        self.memory, self.work, self.guesses = RunMemory(), WorkMeter(), Guesses()
        self.other_libraries = OtherLibraries(self.guesses)
        self.storages = Storages(born=self.memory.born, died=self.memory.died)
        self.disk = PlannedDisk(self.work)
        self.steps: list[RankWork] = []  # one for each optimizer step
        self.engines: list[EngineBase] = []
        self.problem: Obstacle | None = None
        self.last_forward: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None  # arguments
        self.saved_bytes = 0  # this rank's part of a checkpoint
        self.waits_for = ""  # what another rank has to tell first, where it has ended for that
        self.mode = WithoutValues(self.storages, self.guesses, device=device, computed=self._computed)
        self._holds_files_back = holds_files_back
        self.stages = PlannedStages(self.mode, {} if told is None else told)
        self._put_stand_ins(device_bytes, rank, world_size)
        if has_fused_attention:
            choose_attention(self.mode)

    def _computed(self, func: Any, args: Any, kwargs: Any, tensors: Any, results: Any, out: Any) -> None:
        self.memory.tick()
        self.other_libraries.ran(func)
        if _waits_for_copy(func, args, kwargs, tensors, results):
            host_waits()
        self.work.add(func, args, kwargs, tensors, results, out)

    def _put_stand_ins(self, device_bytes: int, rank: int, world_size: int) -> None:
        """Replace in this process what needs values, a GPU or other ranks."""
        torch._C._set_only_lift_cpu_tensors(True)
        memory = self.memory
        is_on_gpu = self.device.type == "cuda"
        if is_on_gpu:
            PlannedGpu(
                total_bytes=device_bytes,
                allocated=memory.allocated,
                peak=memory.peak,
                reset_peak=memory.reset_peak,
            ).put()
            take_device_numbers()
        self.work.is_on_gpu = is_on_gpu
        join_alike_ranks(rank=rank, size=world_size, backend="nccl" if is_on_gpu else "gloo")
        answer_for_tensors(self.mode)
        cast_as_autocast()
        choose_by_device()
        self.other_libraries.put()
        self.work.watch_wires()
        self.disk.put()
        plan_saves(memory)
        plan_generations(memory)
        plan_loads(memory)
        plan_loads_of_weights(memory)
        plan_saved_tensors(self.mode, may_overwrite=self._holds_files_back)
        kernels: Any = _C
        kernels.step, kernels.squared_norm = self._step, lambda *args, **kwargs: 1.0
        kernels.lamb_directions, kernels.lamb_apply = self._lamb_directions, lambda *args, **kwargs: None
        PlannedPages(self.storages, memory).put()
        # The other ranks say of themselves what this one says: that they hold the same part of a tensor.
        divided: Any = parts
        divided.are_whole = lambda cuts: True
        compared: Any = copied_gradients
        compared._MOST = math.inf
        self._guess_norm()
        self._watch(StepEngine, "forward", FORWARD)
        self._watch(StepEngine, "backward", BACKWARD)
        self._watch(StepEngine, "step", STEP)
        self._watch(StagesEngine, "train_batch", "batch through the stages")
        self.stages.put()
        self._keep_batch()
        self._end_after_steps()
        _load_in_this_process()
        self._enter_in_threads()

    def _enter_in_threads(self) -> None:
        """Have the program's threads and the engine's run without values, too."""
        plain, mode = threading.Thread.run, self.mode

        @functools.wraps(plain)
        def run(thread: threading.Thread) -> None:
            cast_in_this_thread()
            with mode:
                plain(thread)

        kind: Any = threading.Thread
        kind.run = run

    def _guess_norm(self) -> None:
        """Let numbers of the device that ranks tell each other be 1: those told beside them stay known."""
        plain = grad_norm._as_float64
        replaced: Any = grad_norm

        def told(*args: Any, **kwargs: Any) -> torch.Tensor:
            number = plain(*args, **kwargs)
            return number if self.mode.values_of(number) is not None else self.mode.put_number(number, 1.0)

        replaced._as_float64 = told

    def _step(self, name: str, shards: Any, **_: Any) -> None:
        """Count an optimizer's kernel on the host: each array is read and written once."""
        for shard in shards:
            arrays = [getattr(shard, one, None) for one in type(shard).__dataclass_fields__]
            self.work.now.host_bytes += 2 * sum(one.nbytes for one in arrays if isinstance(one, torch.Tensor))

    def _lamb_directions(self, shards: Any, **_: Any) -> list[tuple[float, float]]:
        shards = list(shards)
        self._step("Lamb", shards)
        return [(1.0, 1.0) for shard in shards for _ in shard.segments]

    def _watch(self, kind: type, name: str, phase: str) -> None:
        """Have the phase of this name begin where the engine's method does."""
        plain = getattr(kind, name)
        rehearsal = self

        @functools.wraps(plain)
        def watched(engine: Any, *args: Any, **kwargs: Any) -> Any:
            rehearsal._note(engine)
            rehearsal.memory.is_training = True
            if len(rehearsal.steps) < NUM_STEPS:
                rehearsal.memory.begin(f"step {len(rehearsal.steps) + 1}: {phase}")
            if phase == FORWARD and len(rehearsal.steps) == NUM_STEPS - 1 and engine.training:
                rehearsal.last_forward = args, kwargs
            rehearsal.work.is_update = phase == STEP
            try:
                return plain(engine, *args, **kwargs)
            finally:
                rehearsal.work.is_update = False

        setattr(kind, name, watched)

    def _keep_batch(self) -> None:
        """Keep what the stages take of the last batch, for an evaluation."""
        plain = StagesEngine._take
        rehearsal = self

        @functools.wraps(plain)
        def take(engine: StagesEngine, *args: Any, **kwargs: Any) -> Any:
            batch = plain(engine, *args, **kwargs)
            if len(rehearsal.steps) == NUM_STEPS - 1:
                # a rank needs the inputs, or the labels, or both, and reads pairs
                pairs = zip_longest(batch.inputs, batch.labels, fillvalue=batch.loss_factor)
                rehearsal.last_forward = (iter(list(pairs)),), {}
            return batch

        engine_class: Any = StagesEngine
        engine_class._take = take

    def _note(self, engine: EngineBase) -> None:
        if all(engine is not one for one in self.engines):
            self.engines.append(engine)
            tell_kinds(engine._model, self.storages, self.memory)
            self.work.begin()

    def _end_after_steps(self) -> None:
        plain = EngineBase._end_micro_batch
        rehearsal = self

        @functools.wraps(plain)
        def ended(engine: EngineBase, *args: Any, **kwargs: Any) -> None:
            before = engine._progress.global_steps + engine._progress.skipped_steps
            plain(engine, *args, **kwargs)
            if engine._progress.global_steps + engine._progress.skipped_steps > before:
                tell_kinds(engine._model, rehearsal.storages, rehearsal.memory)
                if engine is rehearsal.engines[0]:
                    rehearsal.steps.append(rehearsal.work.begin())
                    if len(rehearsal.steps) == NUM_STEPS:
                        raise PlanEnded

        base: Any = EngineBase
        base._end_micro_batch = ended

    def described(self) -> dict[str, Any]:
        """Return the sizes of the model that was trained."""
        if not self.engines:
            return {}
        engine = self.engines[0]
        sub_buffers = [one for unit in engine._model.units for one in unit.sub_buffers]
        count = {True: 0, False: 0}
        for one in sub_buffers:
            count[one.is_trained] += sum(slot.numel for slot in one.layout.slots)
        return {
            "num_trained": count[True],
            "num_frozen": count[False],
            "stage": engine._policy.stage,
            "micro_batch_size": engine.settings.micro_batch_size,
            "num_micro_batches": engine._accumulation.num_micro_batches,
        }

    @property
    def mesh(self) -> dict[str, Any] | None:
        """Return the sizes of the axes along which the engine divides the job's ranks, and their order; None
        without an engine.
        """
        if not self.engines:
            return None
        engine = self.engines[0]
        experts = [axis.size for axis, _ in engine._domains.of_experts.values()]
        return asdict(engine._axes) | {"ep": max(experts, default=1)}

    def run(self, program: Callable[[], object]) -> None:
        """Run it to the end of the last planned step; a problem is noted."""
        try:
            self._run(program)
            if self.problem is None:
                with self.mode:
                    self._go_on()
        except UntoldInputError as error:
            self.waits_for = error.place
        finally:
            names = {id(one): name for engine in self.engines for name, one in engine.module.named_modules()}
            self.memory.name_modules(names)

    def _go_on(self) -> None:
        """Do what runs do between steps. A program may do nothing of it, and what it cannot do is left out:
        a model that is never evaluated may have no forward for that, one that is never saved may have what no
        checkpoint can hold.
        """
        engine = self.engines[0]
        if self.last_forward is not None:
            with self._left_out("the evaluation"):
                rehearse_evaluation(engine, self.last_forward, self.memory)
            self.last_forward = None
        with self._left_out("the save"):
            self.saved_bytes = rehearse_save(engine, self.memory)
        with self._left_out("the load"):
            rehearse_load(engine, self.memory)

    @contextmanager
    def _left_out(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self.guesses.lines[f"{what} after the steps"] = f"it is left out, because of {why}"

    def _run(self, program: Callable[[], object]) -> None:
        self.memory.begin(BUILD)
        try:
            with self.mode:
                program()
        except PlanEnded:
            pass
        except SystemExit as ended:
            if len(self.steps) < NUM_STEPS:
                self.problem = _end_of_program(ended) if ended.code or self.engines else _NO_ENGINE
        except UntoldInputError as error:
            self.waits_for = error.place
            self.problem = Obstacle("", str(error))
        except BaseException as error:
            self.problem = _obstacle(error)
            if os.environ.get("DSLAUNCH_PLAN_TRACEBACK"):
                traceback.print_exc()
        else:
            if not self.engines:
                self.problem = _NO_ENGINE._replace(line=sys.argv[0])
            elif len(self.steps) < NUM_STEPS:
                self.problem = Obstacle(
                    sys.argv[0], f"the program ends after {len(self.steps)} optimizer steps"
                )


def script(path: str, arguments: Sequence[str], *, is_module: bool) -> Callable[[], object]:
    """Return the call that runs a script, or a module, as Python does."""

    def run() -> None:
        sys.argv = [path, *arguments]
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(path, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
            runpy.run_path(path, run_name="__main__")

    return run


def _waits_for_copy(func: Any, args: Any, kwargs: Any, tensors: Any, results: Any) -> bool:
    """Whether the host waits in an operation: it copies between devices, and not beside the host's work."""
    name = func._schema.name
    if name not in ("aten::copy_", "aten::_to_copy"):
        return False
    devices = {one.device.type for one in (*tensors, *results)}
    if devices != {"cpu", "cuda"}:
        return False
    is_beside = kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2])
    return not (is_beside and any(one.is_pinned() for one in (*tensors, *results)))


def _load_in_this_process() -> None:
    """Have data loaders load here: tensors without values cannot be sent between processes."""
    from torch.utils.data import DataLoader

    plain = DataLoader.__init__

    @functools.wraps(plain)
    def without_workers(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in (
            "num_workers",
            "prefetch_factor",
            "persistent_workers",
            "pin_memory",
            "multiprocessing_context",
        ):
            kwargs.pop(name, None)
        plain(self, *args, **kwargs)

    DataLoader.__init__ = without_workers  # type: ignore[method-assign]


def _end_of_program(ended: SystemExit) -> Obstacle:
    """Return where a program ends by sys.exit() before its second step. A text is printed as Python does."""
    if ended.code in (None, 0):
        return Obstacle(_line_of(ended), "the program ends before its second step")
    if not isinstance(ended.code, int):
        print(ended.code, file=sys.stderr, flush=True)
    code = ended.code if isinstance(ended.code, int) else 1
    return Obstacle(_line_of(ended), f"the program ends with exit code {code}", exit_code=code)


def _obstacle(error: BaseException) -> Obstacle:
    """Return what ended the program. A refusal of the runtime, a file or a module that is not there, and code
    that Python cannot read do not come from tensors without values.
    """
    if isinstance(error, UserError):
        return Obstacle(_line_of(error), str(error), is_in_runs=True)
    is_in_runs = isinstance(error, _IN_RUNS)
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, EOFError):
        why += " (standard input is empty in a rehearsal)"
    return Obstacle(_line_of(error), why, is_in_runs)


def _line_of(error: BaseException) -> str:
    """Return the innermost line that is neither torch's, nor the runtime's, nor of Python's own modules."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    python = sysconfig.get_path("stdlib")
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        is_python = file.startswith(python) and "-packages" not in file
        if not is_python and not file.startswith((own, os.path.dirname(torch.__file__), "<")):
            place = f"{file}:{line}"
    return place
