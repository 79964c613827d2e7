"""The engine: a model that trains itself with `engine(batch)`, `engine.backward(loss)`
and `engine.step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import isfinite
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, Sampler

from ..activation import checkpointing
from ..checkpoint.preemption import Preemption
from ..checkpoint.saver import Saver
from ..checkpoint.training_state import Progress
from ..comm.collectives import Collectives, Pending
from ..comm.mesh import make_mesh, make_shard_axis
from ..comm.order_check import OrderCheck
from ..comm.process_group import group_timeout
from ..comm.watchdog.watchdog import watch
from ..config import Config
from ..data_loader import load_data
from ..environment import WorkerEnvironment
from ..errors import ConfigError
from ..offload.offload import Offload, make_offload
from ..placement.offload_plan import StepAt, plan_offload
from ..placement.precision import precision_of
from ..placement.stage_policy import Placement, policy_for_stage
from ..step.delayed_steps import DelayedSteps
from ..step.early_steps import EarlySteps
from ..step.flat_optimizer import FlatOptimizer
from ..step.grad_norm import clip_factor, global_grad_norm
from ..step.host_update import Update
from ..step.loss_scale import LossScaler
from ..step.lr_schedules import check_metric
from ..step.overflow import has_overflow
from ..step.step_schedule import StepSchedule
from ..zero import ds_attributes
from ..zero.leaf_modules import mark_configured, z3_leaf_module
from ..zero.offload_kinds import OffloadStateTypeEnum
from ..zero.param_home import note_homes
from ..zero.sharded_model import ShardedModel
from ..zero.sub_buffer import SubBuffer
from .absent import why_absent
from .checkpoints import Checkpoints
from .direct_backward import DirectBackward
from .instruments import Instruments
from .offload_states import OffloadStates
from .roll_call import RollCall
from .skipped_steps import SkippedSteps


class Engine(Instruments, Checkpoints, OffloadStates):
    """DeepSpeed's engine, hence its many methods. Attributes that it does not have itself are the module's.

    One optimizer step
    ------------------
    Every call of `step()` ends a micro batch. At a gradient accumulation boundary it then averages the
    gradients over all ranks, takes their norm, clips, updates this rank's shards, gathers the
    parameters, sets the gradients to zero and steps the scheduler. Gradients that are infinite or NaN
    change nothing but the counters.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        config: Config,
        optimizer: FlatOptimizer | None,
        device: torch.device,
        worker: WorkerEnvironment,
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
        self.device, self.local_rank = device, worker.local_rank
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._install(config, device)
        self._policy = policy_for_stage(config.zero.stage)
        # Sharded parameters are of use without an optimizer too: to a model that is only asked.
        is_sharded = self._policy.parameters is Placement.SHARDED
        if optimizer is None and self._policy.optimizer is Placement.SHARDED and not is_sharded:
            raise ConfigError(
                f"zero_optimization.stage {self._policy.stage} shards an optimizer's states and there is no "
                "optimizer; name one in the ds_config, or give one to initialize()"
            )
        shape = self._policy.mesh_shape(
            self.world_size,
            group_size=config.zero.mics_shard_size,
            kept_in=config.zero.hpz_partition_size,
        )
        mesh = make_mesh(shard_size=shape.shard_size, states_by_chunk=shape.states_by_chunk)
        self._comm = Collectives(
            mesh, gather_axis=make_shard_axis(shard_size=shape.shard_size) if is_sharded else None
        )
        timeout = group_timeout() or worker.timeout
        self._watchdog = watch(self._comm, limit_s=worker.watchdog_s, timeout=timeout)
        self._order_check = None if mesh.world.is_alone else OrderCheck(self._comm, timeout=timeout)
        self._checks_each_step = worker.checks_order
        self._offload = self._make_offload(optimizer)
        mark_configured(module, config.zero.leaf_module)
        self._model = self._make_model(module, optimizer)
        self._scaler = LossScaler(config.loss_scaling)
        self._direct_backward = self._watch_direct_backward()
        if optimizer is not None:
            optimizer.attach(
                self._model.trained,
                comm=self._comm,
                scaler=self._scaler,
                look_for_overflow=self._look_for_overflow,
            )
            optimizer.clip_grad = config.gradient_clipping
        self._roll_call = self._skipped = None
        if optimizer is not None:
            self._roll_call = RollCall(
                module,
                self._model,
                optimizer.param_groups,
                self._comm,
                ignores_unused=not self._misses_unused(config),
            )
            self._skipped = SkippedSteps(config, self._model.trained, self._comm)
        self._offload.begin()
        self._schedule = self._make_schedule()
        self._progress = Progress()
        self._saver = Saver(self._comm)
        self._max_restarts = worker.max_restarts
        save_dir = config.checkpoint.preemption_save_dir
        self._preemption = None if save_dir is None else Preemption(self._comm, save_dir=save_dir)
        self._model.before_change = self._saver.before_change
        if self._order_check is not None:
            self._model.prefetcher.after_evaluation = partial(self._order_check.end_forward, device)
        self._num_waiting, self._has_begun_micro_batch = 0, False
        self._forced_boundary: bool | None = None
        self.is_compiled = self._is_in_no_sync = False
        self._grad_norm: float | None = None
        self._was_step_applied = False

    def _make_model(self, module: nn.Module, optimizer: FlatOptimizer | None) -> ShardedModel:
        config = self.settings
        model = ShardedModel(
            module,
            policy=self._policy,
            groups=[group["params"] for group in optimizer.param_groups] if optimizer else [],
            precision=precision_of(config),
            unit_sizes=self._policy.unit_sizes(
                reduce_bucket=config.zero.reduce_bucket_numel,
                prefetch_bucket=config.zero.prefetch_bucket_numel,
                max_whole=config.zero.max_whole_numel,
                at_most=self._offload.max_unit_numel,
            ),
            is_leaf=lambda name, module: z3_leaf_module(module),
            device=self.device,
            comm=self._comm,
            offload=self._offload,
            loses_writes=config.origin.is_lenient and not config.zero.enable_sanity_checks,
        )
        note_homes(model)
        ds_attributes.describe(model)
        return model

    def _make_offload(self, optimizer: FlatOptimizer | None) -> Offload:
        zero = self.settings.zero
        name = None if optimizer is None else optimizer.rule.name
        steps_by_part = optimizer is not None and optimizer.rule.steps_by_part
        plan = plan_offload(
            zero,
            self._policy,
            self.device,
            optimizer=name,
            steps_by_part=steps_by_part,
            is_lenient=self.settings.origin.is_lenient,
        )
        if self.settings.checkpoint.async_save and plan.uses_disk:
            raise ConfigError(
                'checkpoint.async_save with device "nvme" would need the host memory that nvme saves; leave '
                "one of them out"
            )
        groups = [] if optimizer is None else optimizer.param_groups
        trained = [one for group in groups for one in group["params"] if one.requires_grad]
        num_trained = sum(param.numel() for param in trained if not is_lazy(param))  # which is an error soon
        return make_offload(plan, zero, self.settings.aio, num_trained=num_trained, comm=self._comm)

    @staticmethod
    def _misses_unused(config: Config) -> bool:
        """Whether a trained parameter without a gradient is an error."""
        zero = config.zero
        return (
            zero.looks_for_unused(is_lenient=config.origin.is_lenient) and not zero.ignore_unused_parameters
        )

    def _make_schedule(self) -> StepSchedule:
        optimizer, step_at = self.optimizer, self._offload.step_at
        if optimizer is None or step_at is StepAt.STEP:
            return StepSchedule()
        if step_at is StepAt.BACKWARD:
            return EarlySteps(
                optimizer.parts,
                device=self.device,
                foresee=self._foresee,
                update_of=optimizer.part_update,
            )
        return DelayedSteps(
            self._model,
            optimizer.parts,
            device=self.device,
            warmup_steps=self._offload.warmup_steps,
            update_of=optimizer.part_update,
        )

    def _foresee(self) -> Update | None:
        """Return what the coming step does if nothing is clipped; None while a backward runs
        that ends no step.
        """
        if self.optimizer is None or self._is_in_no_sync or not self.is_gradient_accumulation_boundary():
            return None
        return self.optimizer.next_update(1.0 / self._scaler.scale)

    @property
    def config(self) -> dict[str, Any]:
        """Return the ds_config as it was given, a dict; `settings` is what it means,
        typed and with defaults.
        """
        return self.settings.origin.given

    # ---- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if self.settings.fp16.auto_cast and self.settings.fp16.enabled:
            args, kwargs = tree_map(_to_half, (args, kwargs))
        self._model.offloaded.check_here("a forward", (OffloadStateTypeEnum.lp_params,))
        with self._watch_forward(), self._autocast(), self._schedule.forward():
            return self.module(*args, **kwargs)

    def _autocast(self) -> AbstractContextManager[object]:
        """What `torch_autocast` asks for.

        Copies in 16 bits are not kept for other uses where parameters come and go.
        """
        wanted = self.settings.torch_autocast
        if not wanted.enabled:
            return nullcontext()
        is_kept = not self.zero_optimization_partition_weights()
        return torch.autocast(self.device.type, dtype=getattr(torch, wanted.dtype), cache_enabled=is_kept)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add this micro batch's gradients, as parts of the mean over the accumulated ones;
        return that part of the loss.

        `scale_wrt_gas` False: the loss is such a part already.
        """
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise ConfigError(
                f"engine.backward() was given {type(loss).__name__} without a gradient; give it the loss "
                "that the model computed, outside torch.no_grad()"
            )
        if scale_wrt_gas:
            loss = self._share(loss)
        self._note_loss(loss)
        self._has_begun_micro_batch = True
        self._model.offloaded.check_here(
            "engine.backward()", (OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads)
        )
        with self._clock.time("backward"):
            if self._roll_call is not None:
                self._roll_call.freezing.look()
            self._model.begin_backward()
            with self._direct_backward.known():
                self._enlarged(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            self._model.end_backward()
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss as a part of the mean over the accumulated micro batches, times the loss scale.

        `engine.scale(loss).backward()` does what `engine.backward(loss)` does,
        for code that calls backward by itself.
        """
        loss = self._share(loss)
        self._note_loss(loss)
        self._has_begun_micro_batch = True
        return self._direct_backward.known_from(self._enlarged(loss))

    def _share(self, loss: Tensor) -> Tensor:
        steps = self.settings.gradient_accumulation_steps
        return loss / steps if steps > 1 else loss

    def _watch_direct_backward(self) -> DirectBackward:
        return DirectBackward(
            [member.param for part in self._model.trained for member in part.members],
            has_loss_scale=self.settings.fp16.enabled,
            loss_scale=lambda: self._scaler.scale,
            num_parts=lambda: self.settings.gradient_accumulation_steps,
        )

    def _enlarged(self, loss: Tensor) -> Tensor:
        return loss if self._scaler.scale == 1.0 else loss.float() * self._scaler.scale

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Say that the micro batches inside end no optimizer step: `step()` is an error there.

        Nothing is sent in vain without it either. Replicated gradients (stages 0 and 1) are averaged at the
        boundary only; sharded ones (stages 2 and 3) are averaged in every backward, here too: to wait would
        cost the memory that is saved.
        """
        was, self._is_in_no_sync = self._is_in_no_sync, True
        try:
            yield
        finally:
            self._is_in_no_sync = was

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Average the gradients of all backwards inside once, at the end; `step()` is an error until then.

        At stages 2 and 3 that is one reduction instead of one for each micro batch, and every rank holds
        whole gradients meanwhile, of the parameters' dtype. Several blocks before a step add up. At stages 0
        and 1 the boundary averages anyway.
        Order:  a collective at the end
        Errors: ConfigError inside another such block
        """
        self._model.check_averaged()
        with self.no_sync(), self._model.coalesced():
            yield

    def allreduce_gradients(self) -> None:
        """Average the gradients now, at a boundary, so that `p.grad` is the average where
        ranks hold whole ones.

        Never needed: `step()` averages. It costs what that costs once more.
        Order: a collective
        """
        if self.is_gradient_accumulation_boundary():
            self._model.average_gradients()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End the micro batch; at a boundary, update the parameters. See "One optimizer step".

        Order:  a collective at a boundary
        Errors: ConfigError inside no_sync(). After the step: CheckpointError if a save beside training has
                failed; LossScaleError if fp16's loss scale would have to fall below its minimum;
                SkippedStepsError after `max_skipped_steps` in a row
        """
        if self._is_in_no_sync:
            raise ConfigError(
                "engine.step() inside engine.no_sync() or engine.coalesce_grad_reduction(); leave the block "
                "before the micro batch that ends a step"
            )
        self._model.offloaded.check_here("engine.step()")
        self._direct_backward.forget()
        self._was_step_applied = False
        is_boundary = self.is_gradient_accumulation_boundary()
        if is_boundary:
            with self._clock.time("step"):
                check_metric(self.lr_scheduler, lr_kwargs or {})
                self._optimizer_step()
        self._progress.micro_steps += 1
        self._num_waiting = 0 if is_boundary else self._num_waiting + 1
        self._has_begun_micro_batch = False
        # What may raise comes last: who catches it goes on with the next batch.
        if is_boundary:
            self._scaler.update(is_overflow=not self._was_step_applied)
            if self._was_step_applied and self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
            self._print_progress()
        self.tput_timer.stop(global_step=is_boundary, report_speed=self.global_rank == 0)
        if is_boundary:
            self._report_step()
            self._end_if_preempted()
            if self._skipped is not None:
                self._skipped.check()
        self._saver.check()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates the parameters."""
        if self._forced_boundary is not None:
            return self._forced_boundary
        # Since the last one: their number in all says nothing once a program, or a checkpoint, has another
        # number for a step.
        return self._num_waiting + 1 >= self.settings.gradient_accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide from now on whether `step()` is a boundary; None counts micro batches again."""
        self._forced_boundary = is_boundary

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of samples per optimizer step, by the number of micro batches;
        call it at a boundary.

        Errors: ValueError if it is not a multiple of the ranks' micro batches
        """
        unit = self.settings.micro_batch_size * self.world_size
        if train_batch_size < unit or train_batch_size % unit:
            raise ValueError(
                f"train_batch_size {train_batch_size} is not a multiple of {unit}: "
                f"{self.settings.micro_batch_size} samples on each of {self.world_size} ranks"
            )
        self._set_batch(
            train_batch_size=train_batch_size, gradient_accumulation_steps=train_batch_size // unit
        )

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the number of samples per micro batch and rank; the number of micro batches stays.

        Errors: ValueError unless it is at least 1
        """
        if micro_batch_size < 1:
            raise ValueError(f"train_micro_batch_size_per_gpu {micro_batch_size} is not a positive number")
        steps = self.settings.gradient_accumulation_steps
        self._set_batch(
            train_batch_size=micro_batch_size * steps * self.world_size, micro_batch_size=micro_batch_size
        )

    def _set_batch(self, **changes: int) -> None:
        self.settings = self.settings.model_copy(update=changes)
        self._direct_backward.watch_if_needed()
        self.tput_timer.batch_size = self.train_batch_size()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero; their memory is kept, whatever `set_to_none` says."""
        self._model.zero_gradients()

    def _optimizer_step(self) -> None:
        optimizer = self.optimizer
        if optimizer is None or self._roll_call is None or self._skipped is None:
            raise ConfigError(
                "engine.step() without an optimizer; name one in the ds_config, or give it to initialize()"
            )
        self._roll_call.call()
        self._model.finish_gradients()
        self._saver.before_change()
        scale = self._scaler.scale  # that of the backwards: it changes between steps only
        self._grad_norm = self._agree_on_norm(self._roll_call) / scale
        is_finite = isfinite(self._grad_norm)
        self._was_step_applied = is_finite or not self.settings.checks_overflow
        optimizer.overflow = not self._was_step_applied
        self._model.take_writes()
        self._schedule.finish()
        self._skipped.end_step(
            self._progress.global_steps + 1,
            is_finite=is_finite,
            is_applied=self._was_step_applied,
            loss_scale=scale,
        )
        if self._was_step_applied:
            max_norm = optimizer.clip_grad if is_finite else None
            self._update(optimizer, clip_factor(self._grad_norm, max_norm=max_norm or 0.0) / scale)
        else:
            self._progress.skipped_steps += 1
        self._roll_call.freezing.end_step(is_applied=self._was_step_applied)
        self._model.end_step()
        self._progress.global_steps += 1
        self._progress.global_samples += self.settings.train_batch_size
        if self._order_check is not None and self._checks_each_step:
            self._order_check.compare()
        self._comm.recorder.step = self._progress.global_steps + 1
        checkpointing.warn_if_never_called(self.settings.activation_checkpointing)

    def _look_for_overflow(self) -> bool:
        self.allreduce_gradients()  # a sum of finite numbers may be infinite
        return has_overflow(self._model.trained, self._comm)

    def _agree_on_norm(self, roll_call: RollCall) -> float:
        """Return the norm of all gradients, after all ranks are seen to train the same, to have averaged
        the same, and all of it.
        """
        trained, check = self._model.trained, self._order_check
        note = [roll_call.note]
        if check is not None:
            check.finish()
            note += [check.fingerprint, float(self._model.is_behind)]
        norm, notes = global_grad_norm(trained, self._comm, note=note)
        roll_call.settle([one[0] for one in notes])
        if check is not None:
            check.check([one[1] for one in notes])
            if any(one[2] for one in notes):
                self._model.catch_up()
                norm, _ = global_grad_norm(trained, self._comm)
        return norm

    def _update(self, optimizer: FlatOptimizer, grad_scale: float) -> None:
        update = optimizer.next_update(grad_scale)
        if self._schedule.begin(update):
            optimizer.num_steps = update.step
            return
        gathers: list[Pending] = []

        def start_unshard(part: SubBuffer) -> None:  # while the next shard is being updated
            gathers.append(self._model.publish(part))

        optimizer.step(grad_scale=grad_scale, after_part=start_unshard)
        for gather in gathers:
            gather.wait()

    def _print_progress(self) -> None:
        every, step = self.settings.steps_per_print, self._progress.global_steps
        if every and step % every == 0 and self.global_rank == 0:
            skipped, lr, mom = self._progress.skipped_steps, self.get_lr(), self.get_mom()
            print(f"{step=}, {skipped=}, {lr=}, {mom=}", flush=True)

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

        Checkpoints keep the position of the one that is `engine.training_dataloader`, unless it has a
        `data_sampler`. `num_local_io_workers` None: this process reads the samples itself.
        Errors: ConfigError for another route, and for a dataset without a length
        """
        return load_data(
            dataset,
            route=route,
            sampler=data_sampler,
            micro_batch_size=batch_size or self.settings.micro_batch_size,
            rank=self.global_rank,
            world_size=self.world_size,
            pin_memory=pin_memory,
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
                raise ConfigError(f"engine.compile({name}={value!r}): is not available here; leave it out")
        if not self.is_compiled:
            self._model.compile({**(compile_kwargs or {}), "backend": backend})
            self.is_compiled = True

    # ---- the module behind

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet
                raise
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            why = why_absent(name)
            if why is None:
                raise
            raise AttributeError(f"engine.{name}, which DeepSpeed has, is not here: {why}") from error

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
        """Give up optimizer states and gradients; the module keeps its parameters and can still be used.

        Errors: CheckpointError, after that, if a save beside training has failed
        """
        if self._preemption is not None:
            self._preemption.close()
        try:
            self._saver.close()
            self._schedule.close()
        finally:
            self.monitor.close()
            if self._roll_call is not None:
                self._roll_call.close()
            self._direct_backward.release()
            self._model.release()
            self._offload.close()
            self._comm.close()
            self.optimizer = None
            if self._watchdog is not None:
                self._watchdog.stop()


def _to_half(value: Any) -> Any:
    return value.half() if isinstance(value, Tensor) and value.is_floating_point() else value
