"""Engines whose steps are recorded: they train as the program says, and note what they compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..config.source import read_source
from ..engine.base import EngineBase
from ..engine.make_engine import Request
from ..engine.stages_engine import StagesEngine
from ..engine.step_engine import StepEngine
from ..environment import CONFIGURED, NumericsRun, read_environment, read_numerics
from ..metrics.memory_numbers import free_host_memory
from ..placement.precision import precision_of
from ..zero.param_access import safe_set_full_fp32_param, safe_set_full_grad
from .changes import Changes
from .loaded import write_loaded
from .own_buffers import own_buffers
from .record import BUFFER, GRADIENT, OTHER, PARAMETER, STATE, StepRecord, num_steps
from .recorder import Recorder
from .same_numbers import SameNumbers
from .whole_values import WholeValues

# Bytes of one element in a plain run: value, float32 master, float64 sum and average, two states, gradient.
_PLAIN_BYTES, _FROZEN_BYTES = 4 + 4 + 8 + 8 + 8 + 4, 4


class Recorded(EngineBase):
    """Common part of both kinds."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        run = read_numerics()
        if run is None:
            raise AssertionError("an engine is recorded, and no comparison asked for it")
        self._compared: NumericsRun = run
        self._recorder: Recorder | None = None
        self._before: StepRecord | None = None  # the step of the other run, whose gradients are taken
        axes = self._axes.coordinates(self.global_rank)
        self._same_numbers = SameNumbers(
            module, place=axes["dp"] * self._axes.sp + axes["sp"], device=self.device
        )
        if self.optimizer is not None:
            self._recorder = Recorder(run)
            self._values = WholeValues(self)
            if run.part != CONFIGURED:
                self._take_parameters(0)
            self._begin(self._recorder)

    def _begin(self, recorder: Recorder) -> None:
        self._changes = Changes()
        values = {
            PARAMETER: self._values.parameters(),
            STATE: self._values.states(),
            OTHER: chain(self._changes.of(self._values.frozen()), self._values.buffers()),
        }
        recorder.begin(values, facts_of(self) | memory_facts(self))

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any] | None]:
        """Load it; before the first step the comparison then begins with what was loaded."""
        result = super().load_checkpoint(*args, **kwargs)
        if self._recorder is not None and self._recorder.step == 1:
            if result[0] is not None:
                self._begin(self._recorder)
            write_loaded(self, self._recorder, result)
        return result

    def _end_micro_batch(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        recorder = self._recorder
        if recorder is None or not self._accumulation.is_step_due:
            super()._end_micro_batch(lr_kwargs)
            return
        self._note_last_loss(recorder)
        scale = self._scaler.scale
        lrs = self.get_lr()
        recorder.before_update(self._values.gradients(), scale=scale)
        if self._compared.part != CONFIGURED:
            self._take_gradients(recorder.step, scale)
        super()._end_micro_batch(lr_kwargs)
        notes = {
            "norm": self._grad_norm,
            "is_applied": self._was_step_applied,
            "lr": lrs,
            "scale": scale,
            "stale": self._values.stale(),
            "dropped": self._same_numbers.dropped,
            "are_drawn": self._same_numbers.are_drawn,
            "is_compiled": self.is_compiled,
        }
        step = recorder.step
        values = {
            PARAMETER: self._values.parameters(),
            STATE: self._values.states(),
            BUFFER: own_buffers(self),
            OTHER: self._changes.of(self._values.frozen()),
        }
        recorder.after_update(values, notes)
        if self._compared.part != CONFIGURED:
            self._take_parameters(step)

    def _note_last_loss(self, recorder: Recorder) -> None:
        """Note a loss that is known only at the end of a batch."""

    def _other(self, step: int) -> StepRecord | None:
        """Return the other run's record of a step; None if it took fewer steps."""
        recorder = self._recorder
        if recorder is None or step > num_steps(self._compared.folder, CONFIGURED, recorder.number):
            return None
        return StepRecord(self._compared.folder, CONFIGURED, recorder.number, step)

    @torch.no_grad()
    def _take_parameters(self, step: int) -> None:
        """Go on with the parameters that the other run had after this step."""
        other = self._other(step)
        for name, param in self._trained() if other is not None else ():
            if other is not None and other.has(PARAMETER, name):
                safe_set_full_fp32_param(param, other.read(PARAMETER, name).to(self.device))

    @torch.no_grad()
    def _take_gradients(self, step: int, scale: float) -> None:
        """Let the update use the gradients of the other run, which are compared with these anyway: so that
        rounding does not grow from step to step.
        """
        other = self._other(step)
        for name, param in self._trained() if other is not None else ():
            if other is not None and other.has(GRADIENT, name):
                safe_set_full_grad(param, other.read(GRADIENT, name).to(self.device) * scale)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        for sub_buffer in self._model.trained:
            for index, member in enumerate(sub_buffer.members):
                yield sub_buffer.true_name(index), member.param


class RecordedSteps(Recorded, StepEngine):
    """An engine whose micro batches the program runs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._same_numbers.forward():
            return super().forward(*args, **kwargs)

    def _begin_backward(self, loss: Tensor) -> None:
        super()._begin_backward(loss)
        if self._recorder is not None:
            self._recorder.note_loss(float(loss.detach()) * self._accumulation.steps)


class RecordedStages(Recorded, StagesEngine):
    """An engine of a model in stages."""

    def _note_last_loss(self, recorder: Recorder) -> None:
        if self.agg_train_loss is not None:
            recorder.note_loss(self.agg_train_loss)


def with_stage_0(request: Request) -> Request:
    """Return the arguments with a ds_config that shards and offloads nothing."""
    _, content = read_source(request.config)
    section = dict(content.get("zero_optimization") or {})
    kept = {name: section[name] for name in ("reduce_bucket_size",) if name in section}
    return replace(request, config={**content, "zero_optimization": {**kept, "stage": 0}})


def facts_of(engine: EngineBase) -> dict[str, Any]:
    """Return facts of a run that bounds depend on, or that its description names."""
    settings, axes = engine.settings, engine._axes
    precision = precision_of(settings)
    dtype = precision.parameters
    autocast = settings.torch_autocast
    sizes = {name: getattr(axes, name) for name in ("pp", "dp", "sp", "tp")}
    found = sorted({str(param.dtype) for param in engine.module.parameters() if param.is_floating_point()})
    return {
        "dtype": str(dtype or (found[0] if found else "torch.float32")).removeprefix("torch."),
        "computes_in": autocast.dtype if autocast.enabled else "",
        "masters": str(precision.masters).removeprefix("torch."),
        "states": str(precision.states).removeprefix("torch."),
        "axes": sizes,
        "divides_experts": bool(engine._domains.of_experts),
        "device": engine.device.type,
        "stage": settings.zero.stage,
        "micro_batches": settings.gradient_accumulation_steps,
        "clipping": settings.gradient_clipping,
        "optimizer": None if engine.optimizer is None else engine.optimizer.rule.name,
    }


def memory_facts(engine: EngineBase) -> dict[str, int]:
    """Return the bytes that a rank of the plain run needs, and those that are free for it.

    Order: a collective
    """
    own = torch.tensor([0, 0], dtype=torch.int64, device="cpu")
    for sub_buffer in (one for unit in engine._model.units for one in unit.sub_buffers):
        numel = sum(prod(sub_buffer.whole_shape(index)) for index in range(len(sub_buffer.members)))
        num_names = len(sub_buffer.true_names(0))
        own[0] += numel * num_names * (_PLAIN_BYTES if sub_buffer.is_trained else _FROZEN_BYTES)
    if engine.device.type == "cuda":
        own[1] = torch.cuda.get_device_properties(engine.device).total_memory
    else:
        workers = read_environment().local_world_size
        own[1] = free_host_memory() // max(workers, 1)
    everywhere = engine._domains.job.all_gather_objects(own.tolist(), what="memory of a plain run")
    stages = [everywhere[rank][0] for rank in engine._domains.stage_leaders]
    return {"plain_bytes": sum(stages), "free_bytes": min(free for _, free in everywhere)}
