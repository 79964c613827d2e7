"""Common part of both kinds of engine: a model in flat buffers, the end of a step, batch sizes, memory, data,
saving and loading.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from ...shared.axes import Axes
from ..checkpoint.training_state import Progress, Training
from ..config import Config
from ..data.loader import Loader, load_data
from ..environment import WorkerEnvironment
from ..errors import ConfigError
from ..experts.placed import PlacedExperts
from ..placement.stage_policy import Placement
from ..step.flat_optimizer import FlatOptimizer
from ..step.lr_schedules import check_metric
from ..tensor.divided_model import DividedModel
from ..tracing.unit_hooks import TracedUnit
from ..zero.model.offload_kinds import OffloadDeviceEnum, OffloadStateTypeEnum
from ..zero.model.parked_states import read_kinds
from .checkpoints import Checkpoints
from .components import Components
from .instruments import Instruments
from .saving import Saving
from .weights import Weights

# The methods of a StepEngine by which a program runs its micro batches; a StagesEngine refuses them.
RUN_BY_THE_PROGRAM = (
    "forward",
    "backward",
    "step",
    "scale",
    "no_sync",
    "coalesce_grad_reduction",
    "allreduce_gradients",
    "set_gradient_accumulation_boundary",
)


class EngineBase(Saving):
    """One model and all that trains it. Attributes that an engine does not have itself are the module's."""

    _shuffles = True  # True: training data are shuffled anew in each epoch

    def __init__(
        self,
        module: nn.Module,
        *,
        axes: Axes,
        config: Config,
        optimizer: FlatOptimizer | None,
        device: torch.device,
        worker: WorkerEnvironment,
        divided: DividedModel | None = None,
        experts: PlacedExperts | None = None,
    ) -> None:
        """Place the module in flat buffers, with rank 0's values; `initialize()` calls this.

        Order: a collective
        """
        super().__init__()
        self.module = module
        self.training = module.training
        self.settings = config
        self.optimizer = optimizer
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.collate_fn: Any = None
        self.mpu: Any = None  # the argument of initialize(); the grid of a model in stages
        self.device, self.local_rank = device, worker.local_rank
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._axes, self._divided = axes, divided
        self.is_compiled = False
        self._progress = Progress()
        instruments = Instruments(module, config, device, job=self, progress=self._progress)
        self._instruments = instruments
        self.monitor, self.tput_timer = instruments.monitor, instruments.tput_timer
        self.flops_profiler = instruments.flops_profiler
        parts = Components(
            module,
            axes=axes,
            config=config,
            optimizer=optimizer,
            device=device,
            worker=worker,
            on_taken=weakref.WeakMethod(self._close),
            divided=divided,
            experts=experts,
        )
        self._policy, self._domains, self._watchdog = parts.policy, parts.domains, parts.watchdog
        self._wire, self._divided_sequences = parts.domains.wire, parts.divided_sequences
        self._offload, self._model, self._scaler = parts.offload, parts.model, parts.scaler
        self._accumulation, self._direct_backward = parts.accumulation, parts.direct_backward
        self._schedule, self._saver, self._optimizer_step = parts.schedule, parts.saver, parts.optimizer_step
        instruments.join(parts.model)
        instruments.tracer.watch(self._units_to_trace)
        self._grad_norm: float | None = None
        self._was_step_applied = False
        self._weights = Weights(module, self._model, self._domains)
        self._checkpoints = Checkpoints(
            self._state_to_save,
            saver=self._saver,
            accumulation=self._accumulation,
            preemption=parts.preemption,
            is_restarted=worker.max_restarts > 0 or worker.resize_file is not None,
            forget_losses=self._forget_losses,
            step=lambda: self._progress.global_steps,
            state=instruments.state,
        )

    def _units_to_trace(self) -> tuple[TracedUnit, ...]:
        """Return the units to trace; none if the whole model is compiled, which hooks would force to compile
        again.
        """
        if self.is_compiled:
            return ()
        return tuple(TracedUnit(unit.name, unit.modules) for unit in self._model.units)

    @property
    def config(self) -> dict[str, Any]:
        """Return the ds_config as a dict, as it was given; `settings` has it typed and with defaults."""
        return self.settings.origin.given

    def _naming_misfits(self) -> AbstractContextManager[object]:
        return nullcontext() if self._divided is None else self._divided.naming_misfits()

    def _autocast(self) -> AbstractContextManager[object]:
        """Return the context that `torch_autocast` asks for.

        autocast's cache of 16-bit copies is off where parameters are gathered and freed.
        """
        wanted = self.settings.torch_autocast
        if not wanted.enabled:
            return nullcontext()
        is_kept = self._policy.parameters is not Placement.SHARDED
        return torch.autocast(self.device.type, dtype=getattr(torch, wanted.dtype), cache_enabled=is_kept)

    def _forget_losses(self) -> None:
        """Forget the losses of the micro batches since the last step."""
        self._instruments.forget_losses()
        if self._optimizer_step is not None:
            self._optimizer_step.skipped.forget_losses()

    # ---- the end of a step

    def _end_micro_batch(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End the micro batch; at a boundary, update the parameters. See `OptimizerStep`.

        Order:  a collective at a boundary
        Errors: those of a step
        """
        self._checkpoints.end_if_saved()
        self._model.parked_states.check_kept("engine.step()")
        self._model.parked_states.check_here("engine.step()")
        self._model.check_not_gathered("engine.step()")
        self._direct_backward.forget()
        self._was_step_applied = False
        is_boundary = self._accumulation.is_step_due
        if is_boundary:
            with self._instruments.time("step"):
                check_metric(self.lr_scheduler, lr_kwargs or {})
                self._grad_norm, self._was_step_applied = self._update()
        self._progress.micro_steps += 1
        self._accumulation.end_micro_batch(is_boundary=is_boundary)
        # Calls that may raise come last: a program that catches the error goes on with the next batch.
        if is_boundary:
            self._scaler.update(is_overflow=not self._was_step_applied)
            if self._was_step_applied and self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
            self._print_progress()
        self._instruments.end_micro_batch(is_boundary=is_boundary)
        if is_boundary:
            self._instruments.end_optimizer_step(
                get_lr=self.get_lr, loss_scale=self._scaler.scale, grad_norm=self._grad_norm
            )
            self._checkpoints.end_if_preempted()
            self._checkpoints.snapshot_if_due()
            if self._optimizer_step is not None:
                self._optimizer_step.skipped.check()
        self._saver.check()

    def _update(self) -> tuple[float, bool]:
        if self._optimizer_step is None:
            raise ConfigError(
                "engine.step() without an optimizer; name one in the ds_config, or give it to initialize()"
            )
        settings = self.settings
        num_samples = settings.micro_batch_size * self.dp_world_size * self._accumulation.num_micro_batches
        return self._optimizer_step.run(settings, self._progress, num_samples=num_samples)

    def _print_progress(self) -> None:
        every, step = self.settings.steps_per_print, self._progress.global_steps
        if every and step % every == 0 and self.global_rank == 0:
            skipped, lr, mom = self._progress.skipped_steps, self.get_lr(), self.get_mom()
            print(f"{step=}, {skipped=}, {lr=}, {mom=}", flush=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero; their memory is kept for any value of `set_to_none`."""
        self._model.zero_gradients()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the next `step()` updates the parameters."""
        return self._accumulation.is_boundary

    # ---- numbers that other parts of the runtime read as well

    def get_lr(self) -> list[float]:
        """Return each parameter group's learning rate."""
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Return each parameter group's momentum, or betas."""
        return [
            group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in self._groups()
        ]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    @property
    def dp_world_size(self) -> int:
        """Return the number of parts into which a batch is divided: one for each rank, or one for each group
        of ranks over which layers are divided.
        """
        return self._axes.dp

    @property
    def mp_world_size(self) -> int:
        """Return the number of ranks over which a layer is divided."""
        return self._axes.tp

    def get_data_parallel_rank(self) -> int:
        """Return the index of the part of the data on which this rank trains."""
        return self._axes.coordinates(self.global_rank)["dp"]

    def train_batch_size(self) -> int:
        """Return the samples of one optimizer step on all ranks."""
        return self.settings.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of one micro batch on one rank."""
        return self.settings.micro_batch_size

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of samples per optimizer step, by the number of micro batches;
        call it at a boundary.

        Errors: ValueError if it is not a multiple of the ranks' micro batches
        """
        unit = self.settings.micro_batch_size * self.dp_world_size
        if not isinstance(train_batch_size, int) or train_batch_size < unit or train_batch_size % unit:
            raise ValueError(
                f"train_batch_size {train_batch_size!r} is not a multiple of {unit}: "
                f"{self.settings.micro_batch_size} samples on each of {self.dp_world_size} ranks"
            )
        self._set_batch(
            train_batch_size=train_batch_size, gradient_accumulation_steps=train_batch_size // unit
        )

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the number of samples per micro batch and rank; the number of micro batches stays.

        Errors: ValueError unless it is at least 1
        """
        if not isinstance(micro_batch_size, int) or micro_batch_size < 1:
            raise ValueError(f"train_micro_batch_size_per_gpu {micro_batch_size!r} is not a positive number")
        steps = self.settings.gradient_accumulation_steps
        self._set_batch(
            train_batch_size=micro_batch_size * steps * self.dp_world_size,
            micro_batch_size=micro_batch_size,
        )

    def _set_batch(self, **changes: int) -> None:
        self.settings = self.settings.model_copy(update=changes)
        self._accumulation.steps = self.settings.gradient_accumulation_steps
        self._direct_backward.watch_if_needed()
        self.tput_timer.batch_size = self.train_batch_size()

    def _state_to_save(self, is_load: bool) -> Training:
        self._model.parked_states.check_kept("load_checkpoint()" if is_load else "save_checkpoint()")
        self._model.parked_states.check_here("a checkpoint", is_load=is_load)
        if is_load:
            self._model.check_not_gathered("a load")
        self._model.before_gather()
        return Training(
            module=self.module,
            model=self._model,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            progress=self._progress,
            loader=self.training_dataloader if isinstance(self.training_dataloader, Loader) else None,
            scaler=self._scaler,
            config=self.settings,
            domains=self._domains,
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the module's parameters under the module's names; `parameters()` goes by this."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    # ---- memory on the device, between two steps. No collectives: every rank may decide for itself

    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum | str] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move these states, default all, to host memory until `reload_states()`,
        and give up their memory on the device.

        Use it between a step and the next forward. Without an accelerator the states only move within host
        memory. Parameters that were moved raise when they are used, and so do the engine's calls that need
        other moved states.
        Errors: ConfigError for unknown states or devices, or while gathered parameters are in use
        """
        if device != OffloadDeviceEnum.cpu:
            raise ConfigError(
                f'offload_states(device={device!r}): states can go to host memory only; write "cpu", or '
                "leave it out"
            )
        self._model.check_averaged()
        self._model.offload(read_kinds(include), pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back all that `offload_states()` has moved, into the same tensors."""
        self._model.reload(non_blocking=non_blocking)

    def empty_partition_cache(self) -> None:
        """Free memory that is kept for the next use: parameters that were gathered early, and the allocator's
        cache.
        """
        self._model.reshard_idle()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- data

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Return micro batches of this rank's part of `dataset`: shuffled for "train",
        in order for "eval" and "predict".

        Checkpoints keep the position of `engine.training_dataloader`, unless it has a `data_sampler`.
        `num_local_io_workers` None: this process reads the samples itself.
        Errors: ConfigError for another route, and for a dataset without a length
        """
        return load_data(
            dataset,
            route=route,
            sampler=data_sampler,
            micro_batch_size=batch_size or self.settings.micro_batch_size,
            rank=self.get_data_parallel_rank(),
            world_size=self.dp_world_size,
            pin_memory=pin_memory,
            shuffle=self._shuffles,
            collate_fn=collate_fn or self.collate_fn,
            drop_last=self.settings.dataloader_drop_last,
            num_workers=num_local_io_workers or 0,
        )

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: object | None = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module with torch.compile; at stage 3, the forward of each block.

        A second call does nothing.

        Errors: ConfigError for DeepCompile's `schedule`, for compiled autograd, or if stage 3 finds no block
        """
        refused = {"schedule": schedule, "compiled_autograd_enabled": compiled_autograd_enabled or None}
        for name, value in refused.items():
            if value is not None:
                raise ConfigError(f"engine.compile({name}={value!r}) is not available here; leave it out")
        kwargs = dict(compile_kwargs or {})
        if self.device.type == "cuda" and self._model.has_shards and _records_graphs(kwargs):
            raise ConfigError(
                f"engine.compile(compile_kwargs={kwargs!r}): CUDA graphs record addresses, and gathered "
                "parameters have others at each use, so that every step would record anew; leave it out, or "
                "use stage 0, 1 or 2"
            )
        if not self.is_compiled:
            self._model.compile({**kwargs, "backend": backend})
            self.is_compiled = True

    # ---- the module behind

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # the module is not set yet
                raise
        try:
            return getattr(self.module, name)
        except AttributeError as error:  # Python's traceback then suggests the nearest name
            text = f"neither the engine nor its module, a {type(self.module).__name__}, has {name!r}"
            raise AttributeError(text, name=name, obj=self) from error

    def __deepcopy__(self, memo: object) -> NoReturn:
        self._refuse_copy()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse_copy()

    def _refuse_copy(self) -> NoReturn:
        raise ConfigError(
            "the engine was given to copy or pickle, and it is bound to this process, its ranks and their "
            "connections; take engine.module_state_dict() for the weights, or engine.save_checkpoint() for "
            "all of it"
        )

    def destroy(self) -> None:
        """Free optimizer states and gradients; the module keeps its parameters and can still be used.

        Errors: CheckpointError, after all else is done, if a save beside training has failed
        """
        self._close()
        self.optimizer = None

    def _close(self) -> None:
        """End all that the engine has begun, and give up its parts."""
        try:
            self._checkpoints.close()
            self._schedule.close()
        finally:
            self._instruments.close()
            if self._optimizer_step is not None:
                self._optimizer_step.roll_call.close()
            self._direct_backward.release()
            self._model.release()
            self._offload.close()
            self._domains.close()
            self._optimizer_step = None
            if self._watchdog is not None:
                self._watchdog.stop()


def _records_graphs(compile_kwargs: Mapping[str, Any]) -> bool:
    """Tell whether torch.compile() would make CUDA graphs."""
    options = compile_kwargs.get("options") or {}
    is_asked = compile_kwargs.get("mode") in ("reduce-overhead", "max-autotune")
    return is_asked or bool(options.get("triton.cudagraphs"))


def to_half(value: Any) -> Any:
    """Return a floating-point tensor as float16, and any other value as it is."""
    return value.half() if isinstance(value, Tensor) and value.is_floating_point() else value
