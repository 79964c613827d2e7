"""Parts of an engine, and the order in which they are made."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...shared.axes import Axes
from ..checkpoint.preemption import Preemption
from ..checkpoint.saver import Saver
from ..checkpoint.snapshots import Snapshots
from ..comm.order_check import OrderCheck
from ..comm.process_group import group_timeout
from ..comm.rank_group import Job
from ..comm.watchdog.watchdog import watch
from ..config import Config
from ..config.precision import Fp16Config
from ..environment import WorkerEnvironment
from ..errors import ConfigError
from ..experts.placed import PlacedExperts
from ..log import logger as _log
from ..mesh.current import note
from ..mesh.domain import Domains
from ..metrics.device_memory import watch_memory
from ..offload.offload import Offload, make_offload
from ..pipeline.module import StagesModule
from ..pipeline.tied import check_tied, tie
from ..placement.offload_plan import StepAt, plan_offload
from ..placement.precision import precision_of
from ..placement.stage_policy import Placement, Policy, policy_for_stage
from ..sequence.hugging_face import registered
from ..sequence.requested import DividedSequences
from ..step.delayed_steps import DelayedSteps
from ..step.early_steps import EarlySteps
from ..step.flat_optimizer import FlatOptimizer
from ..step.host_update import Update
from ..step.loss_scale import LossScaler
from ..step.overflow import has_overflow
from ..step.step_schedule import StepSchedule
from ..tensor.divided_model import DividedModel
from ..zero import ds_attributes
from ..zero.model.sharded_model import ShardedModel
from ..zero.model.trainer import Trainer
from ..zero.param_location import note_locations
from ..zero.units.leaf_modules import mark_configured, z3_leaf_module
from .accumulation import Accumulation
from .agreed_settings import agreed_settings
from .direct_backward import DirectBackward
from .optimizer_step import OptimizerStep
from .place_file import write_place
from .roll_call import RollCall
from .skipped_steps import SkippedSteps


class EngineTrainer(Trainer):
    """The view that a model has of its engine. It has no optimizer, so that a kept model does not
    keep that.
    """

    def __init__(
        self,
        accumulation: Accumulation,
        saver: Saver,
        order_check: OrderCheck | None,
        *,
        device: torch.device,
        has_optimizer: bool,
        on_taken: Callable[[], Callable[[], None] | None],
    ) -> None:
        self._accumulation, self._saver, self._order_check = accumulation, saver, order_check
        self.device, self._has_optimizer, self._on_taken = device, has_optimizer, on_taken
        self.schedule = StepSchedule()
        self.hooks: list[Callable[[], object]] = []  # calls that remove the hooks

    def ends_step(self) -> bool:
        """True if a step ends; never without an optimizer."""
        is_boundary = self._accumulation.is_boundary and not self._accumulation.is_in_no_sync
        return self._has_optimizer and is_boundary

    def before_change(self) -> None:
        """Let a save beside training copy its remaining values before these change."""
        self._saver.before_change()

    def before_gather(self) -> None:
        """End the update that is under way, if there is one.

        Order: a collective
        """
        self.schedule.before_gather()

    def after_evaluation(self) -> None:
        """Compare with the other ranks which units were gathered.

        Order: a collective
        """
        if self._order_check is not None:
            self._order_check.end_forward(self.device)

    def before_end(self) -> None:
        """Remove the engine's hooks from all parameters."""
        for release in self.hooks:
            release()

    def on_taken(self) -> Callable[[], None] | None:
        """Return the call that ends the engine."""
        return self._on_taken()


class Components:
    """Parts of one engine, made in the order of their dependencies. Without an optimizer there is no
    `optimizer_step`.
    """

    def __init__(  # noqa: PLR0913
        self,
        module: nn.Module,
        *,
        axes: Axes,
        config: Config,
        optimizer: FlatOptimizer | None,
        device: torch.device,
        worker: WorkerEnvironment,
        on_taken: Callable[[], Callable[[], None] | None],
        divided: DividedModel | None = None,
        experts: PlacedExperts | None = None,
    ) -> None:
        """Place the module in flat buffers, with rank 0's values, and make all parts that train it.
        `on_taken` returns the function that ends this engine when another engine takes its parameters.

        Order:  a collective
        Errors: ConfigError for arguments or settings that contradict each other
        """
        self._device, self._optimizer = device, optimizer
        self.policy = _policy(config, optimizer)
        self.domains = _domains(module, axes, self.policy, config)
        job = self.domains.job
        note(self.domains)
        if divided is not None:
            divided.join(self.domains, device)
            divided.agree_on_random_numbers(device)
        if experts is not None:
            experts.join(self.domains)
        write_place(worker, self.domains)
        _tell_of_storage(config, worker, job)
        timeout = group_timeout() or worker.timeout
        self.watchdog = watch(job, limit_s=worker.watchdog_s, timeout=timeout)
        # None on a rank that waits for no other
        self.order_check = None if job.is_alone else _order_check(self.domains, timeout)
        self.accumulation = Accumulation(
            config.gradient_accumulation_steps,
            is_managed=config.managed_gradient_accumulation,
            sum_over=axes.dp if config.gradient_allreduce_op == "sum" else 1,
        )
        self.saver = Saver(job, None if optimizer is None else _snapshots(worker, job))
        self.scaler = LossScaler(_loss_scaling(config, self.policy))
        self.schedule = StepSchedule()
        self._trainer = EngineTrainer(
            self.accumulation,
            self.saver,
            self.order_check,
            device=device,
            has_optimizer=optimizer is not None,
            on_taken=on_taken,
        )
        self.offload = _offload(self.policy, config, optimizer, device=device, job=job)
        mark_configured(module, config.zero.leaf_module)
        self.model = _model(self, module, config, optimizer, self._trainer)
        if self.policy.parameters is Placement.SHARDED:
            # Makes process groups. Every rank comes here: all were checked to have the same config.
            self.domains.gather_beside()
        self.direct_backward = DirectBackward(
            [member.param for sub_buffer in self.model.trained for member in sub_buffer.members],
            has_loss_scale=config.fp16.enabled,
            loss_scale=partial(getattr, self.scaler, "scale"),
            divisor=partial(getattr, self.accumulation, "divisor"),
        )
        self._trainer.hooks.append(self.direct_backward.release)
        self.preemption = _preemption(config, worker, job)
        self.optimizer_step: OptimizerStep | None = None
        if optimizer is None:
            self.offload.begin()
        else:
            self.optimizer_step = self._optimizer_step(module, config, optimizer, worker, divided)
        self.divided_sequences = _divided_sequences(module, self.domains, config)

    def _optimizer_step(
        self,
        module: nn.Module,
        config: Config,
        optimizer: FlatOptimizer,
        worker: WorkerEnvironment,
        divided: DividedModel | None,
    ) -> OptimizerStep:
        optimizer.attach(
            self.model.trained,
            comm=self.domains.dense.comm,
            scaler=self.scaler,
            look_for_overflow=self._has_overflow,
            zero_gradients=self.model.zero_gradients,
        )
        optimizer.clip_grad = config.gradient_clipping
        roll_call = _roll_call(module, self.model, config, optimizer, job=self.domains.job)
        self._trainer.hooks.append(roll_call.close)
        skipped = SkippedSteps(config, self.model.trained, self.domains.job)
        self.offload.begin()
        self.schedule = _schedule(
            self.model, optimizer, self.offload, device=self._device, foresee=self._foresee
        )
        self._trainer.schedule = self.schedule
        return OptimizerStep(
            optimizer,
            model=self.model,
            domains=self.domains,
            scaler=self.scaler,
            schedule=self.schedule,
            saver=self.saver,
            roll_call=roll_call,
            skipped=skipped,
            order_check=self.order_check,
            inputs=None if divided is None else divided.inputs,
            preemption=self.preemption,
            checks_order_each_step=worker.checks_order,
        )

    def _has_overflow(self) -> bool:
        if self.accumulation.is_boundary:
            self.model.average_gradients()  # a sum of finite numbers may be infinite
        return has_overflow(self.model.trained, self.domains.job, self._device)

    def _foresee(self) -> Update | None:
        """Return the arguments of the coming step if nothing is clipped; None during a backward that ends no
        step.
        """
        if self._optimizer is None or not self._trainer.ends_step():
            return None
        return self._optimizer.next_update(1.0 / self.scaler.scale)


def _preemption(config: Config, worker: WorkerEnvironment, job: Job) -> Preemption | None:
    """Return the watch for an early end of the program; None if no early end is possible."""
    save_dir, file = config.checkpoint.preemption_save_dir, worker.resize_file
    return None if save_dir is None and file is None else Preemption(job, save_dir=save_dir, resize_file=file)


def _snapshots(worker: WorkerEnvironment, job: Job) -> Snapshots | None:
    if worker.snapshots is None:
        return None
    return Snapshots(job, worker.snapshots)


def _divided_sequences(module: nn.Module, domains: Domains, config: Config) -> DividedSequences | None:
    """Return the checks of divided sequences; log how gradients are combined if programs may expect another
    way.
    """
    if domains.axes.sp == 1:
        for one in registered():
            one.check_size(1)
        return None
    is_chosen = "sequence" in config.origin.given
    if domains.dense.comm.mesh.divisor and not is_chosen and domains.job.is_first:
        _log.warning(
            "gradients are added over the %d ranks that share a sequence, as DeepSpeed does: with "
            "transformers' "
            'loss they, and their norm, are %d times those of one process; set sequence.gradient to "mean" '
            "in the "
            'ds_config for the same, or to "sum" to be told no more',
            domains.axes.sp,
            domains.axes.sp,
        )
    return DividedSequences(module, domains.axes, domains.sequence.group)


def _tell_of_storage(config: Config, worker: WorkerEnvironment, job: Job) -> None:
    if config.checkpoint.use_node_local_storage and worker.local_world_size < job.size and job.is_first:
        _log.warning(
            "checkpoint.use_node_local_storage true is not done where ranks are on several hosts: every host "
            "must see the folder that save_checkpoint() is given, or nothing is saved and an error says so; "
            "give a shared folder or a URL, or leave the key out (TrainingArguments: save_on_each_node)"
        )


def _loss_scaling(config: Config, policy: Policy) -> Fp16Config:
    """Return the settings of the loss scale. For a program written for DeepSpeed there is no hysteresis if no
    value is sharded, as in DeepSpeed.
    """
    scaling = config.loss_scaling
    if config.origin.is_lenient and not policy.is_sharded:
        return scaling.model_copy(update={"hysteresis": 1})
    return scaling


def _policy(config: Config, optimizer: FlatOptimizer | None) -> Policy:
    policy = policy_for_stage(config.zero.stage)
    # Parameters are sharded without an optimizer too, for a model that is only evaluated.
    is_sharded = policy.parameters is Placement.SHARDED
    if optimizer is None and policy.optimizer is Placement.SHARDED and not is_sharded:
        raise ConfigError(
            f"zero_optimization.stage {policy.stage} shards an optimizer's states and there is no optimizer; "
            "name one in the ds_config, or give one to initialize()"
        )
    return policy


def _domains(module: nn.Module, axes: Axes, policy: Policy, config: Config) -> Domains:
    shape = policy.mesh_shape(
        axes.dp * axes.sp,
        group_size=config.zero.mics_shard_size,
        kept_in=config.zero.hpz_partition_size,
    )
    domains = Domains(
        axes,
        shard_size=shape.shard_size,
        states_by_chunk=shape.states_by_chunk,
        divisor=axes.dp if config.sequence is not None and config.sequence.gradient == "sum" else 0,
    )
    if isinstance(module, StagesModule):
        tie(module, domains, is_sharded=policy.is_sharded)
    return domains


def _offload(
    policy: Policy,
    config: Config,
    optimizer: FlatOptimizer | None,
    *,
    device: torch.device,
    job: Job,
) -> Offload:
    plan = plan_offload(
        config.zero,
        policy,
        device,
        optimizer=None if optimizer is None else optimizer.rule.name,
        states_may_leave=optimizer is not None and optimizer.rule.states_may_leave,
        steps_on_host=optimizer is not None and optimizer.rule.steps_by_sub_buffer,
        is_lenient=config.origin.is_lenient,
    )
    if config.checkpoint.async_save and plan.uses_disk:
        raise ConfigError(
            'checkpoint.async_save with device "nvme" would need the host memory that nvme saves; leave one '
            "of them out"
        )
    groups = [] if optimizer is None else optimizer.param_groups
    trained = [one for group in groups for one in group["params"] if one.requires_grad]
    num_trained = sum(
        param.numel() for param in trained if not is_lazy(param)
    )  # a lazy parameter has no size; a later check raises for it
    return make_offload(plan, config.zero, config.aio, num_trained=num_trained, job=job)


def _order_check(domains: Domains, timeout: timedelta) -> OrderCheck:
    return OrderCheck(domains.job, holders=domains.holders, data_lines=domains.data_lines, timeout=timeout)


def _model(
    parts: Components,
    module: nn.Module,
    config: Config,
    optimizer: FlatOptimizer | None,
    trainer: EngineTrainer,
) -> ShardedModel:
    policy, device = parts.policy, trainer.device
    # A tied module is a unit of its own on every stage, whatever other layers the stage has.
    tied = set(map(id, module.tied_modules.values())) if isinstance(module, StagesModule) else set()
    model = ShardedModel(
        module,
        policy=policy,
        groups=[group["params"] for group in optimizer.param_groups] if optimizer else [],
        groups_apart=optimizer.rule.groups_apart if optimizer else frozenset(),
        precision=precision_of(config),
        unit_sizes=policy.unit_sizes(
            reduce_bucket=config.zero.reduce_bucket_numel,
            prefetch_bucket=config.zero.prefetch_bucket_numel,
            max_whole=config.zero.max_whole_numel,
            at_most=parts.offload.max_unit_numel,
        ),
        is_leaf=lambda name, module: z3_leaf_module(module) or id(module) in tied,
        device=device,
        domains=parts.domains,
        offload=parts.offload,
        trainer=trainer,
        loses_writes=config.origin.is_lenient and not config.zero.enable_sanity_checks,
        settings=agreed_settings(config, optimizer),
    )
    if isinstance(module, StagesModule):
        check_tied(module, model)
    if config.origin.is_lenient:
        model.hide_gradients_as_none()
    note_locations(model)
    ds_attributes.describe(model)
    if device.type == "cuda":
        watch_memory(model)
    return model


def _roll_call(
    module: nn.Module, model: ShardedModel, config: Config, optimizer: FlatOptimizer, *, job: Job
) -> RollCall:
    zero = config.zero
    misses_unused = (
        zero.looks_for_unused(is_lenient=config.origin.is_lenient) and not zero.ignore_unused_parameters
    )
    return RollCall(module, model, optimizer.param_groups, job, ignores_unused=not misses_unused)


def _schedule(
    model: ShardedModel,
    optimizer: FlatOptimizer | None,
    offload: Offload,
    *,
    device: torch.device,
    foresee: Callable[[], Update | None],
) -> StepSchedule:
    if optimizer is None or offload.step_at is StepAt.STEP:
        return StepSchedule()
    if offload.step_at is StepAt.BACKWARD:
        return EarlySteps(
            optimizer.sub_buffers, device=device, foresee=foresee, update_of=optimizer.sub_buffer_update
        )
    return DelayedSteps(
        model,
        optimizer.sub_buffers,
        device=device,
        warmup_steps=offload.warmup_steps,
        update_of=optimizer.sub_buffer_update,
    )
