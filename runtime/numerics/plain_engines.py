"""Engines of the plain run: every rank has the whole model, whose gradients and update are torch's own.

They have the calls of the engines that they stand for, so that a program does not notice; of the engine's
parts they have none but the groups of ranks, for programs that ask for these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...shared.axes import Axes
from ..checkpoint.training_state import Progress
from ..config import Config
from ..engine.base import EngineBase, to_half
from ..engine.instruments import Instruments
from ..engine.stages_engine import StagesEngine
from ..engine.step_engine import StepEngine
from ..environment import CONFIGURED, WorkerEnvironment, read_numerics
from ..errors import ConfigError
from ..mesh.current import note
from ..mesh.domain import Domains
from ..placement.precision import precision_of
from ..placement.stage_policy import Placement, policy_for_stage
from ..step.flat_optimizer import FlatOptimizer
from ..step.loss_scale import LossScaler
from ..zero.stand_ins import note_stand_in
from .changes import Changes
from .loaded import read_loaded, take_loaded
from .own_buffers import own_buffers
from .plain_gradients import PlainGradients
from .plain_model import place_whole
from .plain_param import PlainParam
from .plain_update import PlainScale, PlainUpdate, norm_of
from .plain_weights import PlainWeights
from .record import BUFFER, GRADIENT, OTHER, PARAMETER, STATE, StepRecord, num_steps
from .recorded_engines import facts_of
from .recorder import Recorder
from .same_numbers import SameNumbers


class Plain(EngineBase):
    """Common part of both kinds."""

    def __init__(
        self,
        module: nn.Module,
        *,
        axes: Axes,
        config: Config,
        optimizer: FlatOptimizer | None,
        device: torch.device,
        worker: WorkerEnvironment,
    ) -> None:
        """Order: a collective"""
        nn.Module.__init__(self)
        run = read_numerics()
        if run is None:
            raise AssertionError("an engine is plain, and no comparison asked for it")
        self.module, self.settings, self.optimizer = module, config, optimizer
        self.training = module.training
        self.lr_scheduler = self.training_dataloader = self.collate_fn = self.mpu = None
        self.device, self.local_rank = device, worker.local_rank
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._axes, self._divided, self.is_compiled = axes, None, False
        self._policy = policy_for_stage(config.zero.stage)
        self._progress = Progress()
        self._instruments = Instruments(module, config, device, job=self, progress=self._progress)
        self.monitor, self.tput_timer = self._instruments.monitor, self._instruments.tput_timer
        self.flops_profiler = None
        sequence = config.sequence
        self._sums_over_sequence = sequence is not None and sequence.gradient == "sum"
        self._domains = Domains(axes, shard_size=1, divisor=axes.dp if self._sums_over_sequence else 0)
        self._wire = self._domains.wire
        note(self._domains)
        self._scaler = LossScaler(config.loss_scaling)  # what programs read; PlainScale is what counts
        is_one_less = config.origin.is_lenient and not self._policy.is_sharded
        self._scale = PlainScale(
            config.loss_scaling, hysteresis=1 if is_one_less else config.loss_scaling.hysteresis
        )
        self._grad_norm: float | None = None
        self._was_step_applied = False
        self._num_waiting = 0  # micro batches since the last step
        self._is_boundary_forced: bool | None = None
        self._is_in_engine_backward = False
        place = axes.coordinates(self.global_rank)
        self._is_counted = place["pp"] == 0 and place["tp"] == 0  # others compute what a counted rank does
        self._same_numbers = SameNumbers(module, place=place["dp"] * axes.sp + place["sp"], device=device)
        place_whole(module, device=device, precision=precision_of(config))
        self._weights = PlainWeights(module)  # type: ignore[assignment]
        self._update_of: PlainUpdate | None = None
        self._recorder: Recorder | None = None
        if optimizer is not None:
            self._begin(Recorder(run), optimizer)

    def _begin(self, recorder: Recorder, optimizer: FlatOptimizer) -> None:
        optimizer.clip_grad = self.settings.gradient_clipping
        optimizer._scaler = self._scaler
        optimizer._zero_gradients = self.zero_grad
        names = {id(param): name for name, param in self.module.named_parameters()}
        self._update_of = PlainUpdate(optimizer, names)
        trained = {
            name: param for name, param in self.module.named_parameters() if name in self._update_of.masters
        }
        self._gradients = PlainGradients(trained, factor=self._factor)
        for name, param in trained.items():
            stand_in = PlainParam(
                name,
                self._update_of,
                self._gradients,
                is_counted=self._is_counted,
                divisor=lambda: self._divisor * self._scale.value,
            )
            note_stand_in(param, stand_in)
        self._recorder = recorder
        self._differing = self._take_state(recorder, self._update_of)
        facts = {
            **facts_of(self),
            "differing": self._differing,
            "is_torchs": self._update_of.is_torchs,
        }
        recorder.begin({PARAMETER: self._update_of.masters.items() if self.global_rank == 0 else ()}, facts)
        self._changes = Changes()
        for _ in self._changes.of(self._frozen()):
            pass  # all of them are new to it

    def _frozen(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters that no optimizer steps."""
        trained = {} if self._update_of is None else self._update_of.masters
        for name, param in self.module.named_parameters():
            if name not in trained:
                yield name, param.detach()

    @torch.no_grad()
    def _take_state(self, recorder: Recorder, update: PlainUpdate) -> list[str]:
        """Begin with the values that the other run began with; return the names of those that differ."""
        state = StepRecord(recorder.run.folder, CONFIGURED, recorder.number, 0)
        differing = []
        for name, master in update.masters.items():
            if not state.has(PARAMETER, name):
                raise ConfigError(
                    f"dslaunch numerics: parameter '{name}' is trained by plain torch and not by the run as "
                    "configured; see that the program makes the same model in each run"
                )
            value = state.read(PARAMETER, name).to(self.device)
            rounded = update.params[name].dtype
            if not torch.equal(value.to(rounded), master.to(rounded)):
                differing.append(name)
            update.set(name, value)
        own = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        for name in state.names(OTHER):
            if name in own and own[name].shape == state.read(OTHER, name).shape:
                own[name].data.copy_(state.read(OTHER, name))
        return differing

    # ---- a step

    def _factor(self) -> float:
        """Return the factor of gradients that arrive: a backward that is not the engine's knows no share."""
        return 1.0 if self._is_in_engine_backward else 1.0 / self.settings.gradient_accumulation_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the next `step()` updates the parameters."""
        if not self.settings.managed_gradient_accumulation:
            return True
        if self._is_boundary_forced is not None:
            return self._is_boundary_forced
        return self._num_waiting + 1 >= self.settings.gradient_accumulation_steps

    def _end_micro_batch(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        is_boundary = self.is_gradient_accumulation_boundary()
        self._was_step_applied = False
        self._progress.micro_steps += 1
        self._num_waiting = 0 if is_boundary else self._num_waiting + 1
        if is_boundary:
            self._step(lr_kwargs)

    def _step(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        update, recorder, optimizer = self._update_of, self._recorder, self.optimizer
        if update is None or recorder is None or optimizer is None:
            raise ConfigError(
                "engine.step() without an optimizer; name one in the ds_config, or give it to initialize()"
            )
        update.take_writes()
        scale, lrs, step = self._scale.value, self.get_lr(), recorder.step
        divisor, is_counted = self._divisor * scale, self._is_counted
        terms = self._gradients.terms(is_counted=is_counted, divisor=divisor, device=self.device)
        averages = self._gradients.averages(is_counted=is_counted, divisor=divisor)
        recorder.before_update(averages_of_writer(averages, self.global_rank), scale=1.0)
        norm = norm_of(averages)
        is_applied = isfinite(norm) or not self.settings.checks_overflow
        if is_applied:
            given = self._given(recorder, step)
            update.step(given or averages, clipping=(optimizer.clip_grad or 0.0) if isfinite(norm) else 0.0)
        self._scale.update(is_applied=is_applied)
        self._scaler.scale = self._scale.value
        self._grad_norm, self._was_step_applied = norm, is_applied
        optimizer.overflow, optimizer._global_grad_norm = not is_applied, norm
        optimizer.num_steps += is_applied
        self._progress.skipped_steps += not is_applied
        self._progress.global_steps += 1
        self._progress.global_samples += self.settings.train_batch_size
        if is_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self._instruments.end_optimizer_step(
            get_lr=self.get_lr, loss_scale=self._scale.value, grad_norm=self._grad_norm
        )
        notes = {
            "norm": norm,
            "is_applied": is_applied,
            "lr": lrs,
            "scale": scale,
            "stale": [],
            "dropped": self._same_numbers.dropped,
            "are_drawn": self._same_numbers.are_drawn,
            "is_compiled": False,
            "terms": terms if self.global_rank == 0 and is_applied else {},
        }
        is_writer = self.global_rank == 0
        values = {
            PARAMETER: update.masters.items() if is_writer else (),
            STATE: update.states() if is_writer else (),
            BUFFER: own_buffers(self),
            OTHER: self._changes.of(self._frozen()) if is_writer else (),
        }
        recorder.after_update(values, notes)
        if step <= num_steps(recorder.run.folder, CONFIGURED, recorder.number):
            self._go_on_from(StepRecord(recorder.run.folder, CONFIGURED, recorder.number, step), update)

    @property
    def _divisor(self) -> float:
        """Return the number by which the sum of all ranks' gradients is divided."""
        over_data = 1 if self.settings.gradient_allreduce_op == "sum" else self._axes.dp
        return float(over_data * (1 if self._sums_over_sequence else self._axes.sp))

    def _given(self, recorder: Recorder, step: int) -> dict[str, Tensor] | None:
        """Return the gradients of the other run's step, which are compared with the own ones: the update
        takes them, so that rounding does not grow from step to step. None where that run has none that are
        finite.
        """
        if step > num_steps(recorder.run.folder, CONFIGURED, recorder.number) or self._update_of is None:
            return None
        record = StepRecord(recorder.run.folder, CONFIGURED, recorder.number, step)
        given = {
            name: record.read(GRADIENT, name).to(self.device)
            for name in self._update_of.masters
            if record.has(GRADIENT, name)
        }
        is_whole = len(given) == len(self._update_of.masters)
        return given if is_whole and all(bool(one.isfinite().all()) for one in given.values()) else None

    def _go_on_from(self, record: StepRecord, update: PlainUpdate) -> None:
        for name in update.masters:
            if record.has(PARAMETER, name):
                update.set(name, record.read(PARAMETER, name).to(self.device))

    @contextmanager
    def _own_backward(self) -> Iterator[None]:
        self._is_in_engine_backward = True
        try:
            yield
        finally:
            self._is_in_engine_backward = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        if self._update_of is not None:
            self._gradients.forget()

    def _autocast(self) -> AbstractContextManager[object]:
        wanted = self.settings.torch_autocast
        if not wanted.enabled:
            return nullcontext()
        is_kept = self._policy.parameters is not Placement.SHARDED
        return torch.autocast(self.device.type, dtype=getattr(torch, wanted.dtype), cache_enabled=is_kept)

    def _set_batch(self, **changes: int) -> None:
        self.settings = self.settings.model_copy(update=changes)
        self.tput_timer.batch_size = self.train_batch_size()

    # ---- what a program may call besides

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: where values lie changes no number."""

    def reload_states(self, non_blocking: bool = False) -> None:
        """Do nothing."""

    def empty_partition_cache(self) -> None:
        """Do nothing."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: plain torch is not compiled."""
        self.is_compiled = True

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> bool:
        """Do nothing: what the program saves is the run's as configured."""
        return True

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> bool:
        """Do nothing."""
        return True

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any] | None]:
        """Take what the run as configured has loaded.

        Errors: ConfigError after the first step
        """
        recorder, update = self._recorder, self._update_of
        if recorder is None or update is None or recorder.step > 1:
            raise ConfigError(
                "dslaunch numerics compares steps that follow each other, and the program calls "
                "load_checkpoint() between them; leave the call out for the comparison"
            )
        loaded = read_loaded(recorder)
        result: tuple[str | None, dict[str, Any] | None] = loaded["result"]
        if result[0] is not None:
            self._take_state(recorder, update)
            take_loaded(self, loaded)
            self._scale.value = self._scaler.scale = loaded["scale"]
            update.take_states(
                StepRecord(recorder.run.folder, CONFIGURED, recorder.number, 0), loaded["num_steps"]
            )
        return result

    def _close(self) -> None:
        self._instruments.close()
        if self._update_of is not None:
            self._gradients.release()
        self._update_of = None
        self._domains.close()


def averages_of_writer(averages: Mapping[str, Tensor], rank: int) -> list[tuple[str, Tensor]]:
    """Return the gradients on the rank that writes them, as float32; nothing on the others."""
    return [(name, one.float()) for name, one in averages.items()] if rank == 0 else []


class PlainSteps(Plain, StepEngine):
    """An engine whose micro batches the program runs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if self.settings.fp16.auto_cast and self.settings.fp16.enabled:
            args, kwargs = tree_map(to_half, (args, kwargs))
        with self._same_numbers.forward(), self._autocast():
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add this micro batch's gradients; return the loss as its part of the mean."""
        if scale_wrt_gas:
            loss = loss / self.settings.gradient_accumulation_steps
        self._note(loss)
        with self._own_backward():
            (loss.float() * self._scale.value).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss as its part of the mean, times the loss scale."""
        self._note(loss / self.settings.gradient_accumulation_steps)
        return loss.float() * self._scale.value  # the gradients of a backward by the program get the share

    def _note(self, loss: Tensor) -> None:
        if self._recorder is not None:
            self._recorder.note_loss(float(loss.detach()) * self.settings.gradient_accumulation_steps)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End the micro batch; at a boundary, update the parameters."""
        self._end_micro_batch(lr_kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: gradients are averaged in the step."""
        yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Do nothing: gradients are averaged in the step."""
        yield

    def allreduce_gradients(self) -> None:
        """Do nothing: gradients are averaged in the step."""

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide from now on whether `step()` is a boundary; None counts micro batches again."""
        self._is_boundary_forced = is_boundary


class PlainStages(Plain, StagesEngine):
    """An engine of a model whose stages every rank has all."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._data: Iterator[Any] | None = None
        self._batch_fn: Callable[[Any], Any] | None = None
        self.agg_train_loss = self.agg_additional_losses = self.total_loss = None
        self._is_boundary_forced = True  # a batch is one call

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on gradient_accumulation_steps micro batches, one after the other; return their mean loss."""
        self.module.train()
        losses = self._losses(partial(self._kept_source, data_iter), self.micro_batches, trains=True)
        loss = self._mean_loss(losses)
        self.agg_train_loss = loss
        if self._recorder is not None:
            self._recorder.note_loss(loss)
        self._progress.micro_steps += self.micro_batches - 1  # the step counts one
        self._end_micro_batch()
        return loss

    def eval_batch(self, data_iter: Iterator[Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return the mean loss of a batch, on every rank."""
        self.module.eval()
        number = kwargs.get("num_micro_batches") or self.micro_batches
        with torch.no_grad():
            return self._mean_loss(self._losses(partial(self._source, data_iter), number, trains=False))

    def _losses(self, source: Callable[[], Iterator[Any]], number: int, *, trains: bool) -> list[Tensor]:
        """Return the losses of micro batches; ranks of other stages than the first read only their data."""
        is_first = self._axes.coordinates(self.global_rank)["pp"] == 0
        losses: list[Tensor] = []
        pairs = [self._pair(next(source())) for _ in range(number)] if self._reads_data else []
        for inputs, labels in pairs if is_first else ():
            with self._same_numbers.forward(), self._autocast():
                output = self.module.run_stage(0, inputs)
                loss = output if self.module.loss_fn is None else self.module.loss_fn(output, labels)
            losses.append(loss.detach().float().reshape(()))
            if trains:
                with self._own_backward():
                    (loss.float().reshape(()) * (self._scale.value / number)).backward()
        return losses

    def _mean_loss(self, losses: list[Tensor]) -> Tensor:
        """Return the mean over all data; [] float32, on every rank."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        if losses:
            total[0], total[1] = torch.stack(losses).double().mean(), 1.0
        dist.all_reduce(total)
        return (total[0] / total[1]).float()

    def is_first_stage(self) -> bool:
        """Tell whether this rank has the first layers in the run as configured."""
        return self._axes.coordinates(self.global_rank)["pp"] == 0

    def is_last_stage(self) -> bool:
        """Tell whether this rank has the last layers in the run as configured."""
        return self._axes.coordinates(self.global_rank)["pp"] == self._axes.pp - 1

    def destroy(self) -> None:
        """End the engine."""
        EngineBase.destroy(self)
