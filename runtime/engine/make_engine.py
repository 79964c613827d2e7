"""Construction of an engine: from a program's arguments to the object that trains."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from ...kernels.compiled import require_compiled
from ...shared.axes import Axes, axes_of_job
from ..activation import checkpointing
from ..comm.process_group import choose_device
from ..config import Config, load_config
from ..config.pipeline import PipelineConfig
from ..environment import WorkerEnvironment
from ..errors import ConfigError
from ..experts.placed import PlacedExperts
from ..log import logger as _log
from ..mesh.mpu import MpuSizes, check_mpu, read_mpu
from ..offload.host_memory import keep_freed_memory
from ..pipeline.module import StagesModule
from ..pipeline.topology import dimensions_of
from ..placement.precision import precision_of
from ..placement.stage_policy import policy_for_stage
from ..sequence.requested import check_mesh_param, requested_sequence_size
from ..step.choose_optimizer import ClientOptimizer, ModelParameters, choose_optimizer
from ..step.flat_optimizer import FlatOptimizer
from ..step.lr_schedules import make_scheduler
from ..tensor.divide import agree_on_division, divide
from ..tensor.divided_model import DividedModel, check_optimizer, earlier_division
from ..tensor.lower import size_of_plan
from ..tensor.model_init import check_dtype, check_group, requested_size
from ..tensor.own_layers import check_whole
from ..zero.model.sharded_model import ShardedModel
from ..zero.param_location import location_of
from .made_on_meta import said_of_meta, take_from_meta
from .stages_engine import StagesEngine
from .step_engine import StepEngine
from .summary import measure_memory, summarize

ConfigSource = str | os.PathLike[str] | Mapping[str, Any]
_Steps = TypeVar("_Steps", bound=StepEngine)
_Stages = TypeVar("_Stages", bound=StagesEngine)
ClientScheduler = Any  # an object with step(), or a callable that makes one from the optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A program's arguments for an engine."""

    model: nn.Module
    config: ConfigSource
    optimizer: ClientOptimizer | None = None
    model_parameters: ModelParameters | None = None
    training_data: Dataset[Any] | None = None
    lr_scheduler: ClientScheduler | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    mpu: object | None = None  # see mesh/mpu.py
    mesh_param: object | None = None  # the numbers of data parallel and of sequence parallel ranks
    device_index: int | None = None  # index of the GPU, if it is not LOCAL_RANK
    is_lenient: bool = False  # the program was written for DeepSpeed


def make_engine(
    request: Request,
    worker: WorkerEnvironment,
    *,
    steps: type[_Steps],
    stages: type[_Stages],
    optimizers: type[FlatOptimizer],
) -> _Steps | _Stages:
    """Return an engine: of the class `stages` for a model in stages, else of the class `steps`.

    Order:  every rank must call this, once there is a process group
    Errors: ConfigError; ImportError on a CPU, if the kernels could not be compiled
    """
    model = request.model
    sizes = None if request.mpu is None else read_mpu(request.mpu)
    check_whole(model, tp=1 if sizes is None else sizes.tp)
    settings = read_settings(request, worker, sizes)
    axes = axes_of_model(model, settings)
    check_mesh_param(axes, request.mesh_param)
    if request.mpu is not None:
        check_mpu(request.mpu, axes)
    check_group(model, axes)
    _check_stages(model, axes, settings)
    if request.is_lenient:
        settings = with_precision_of(model, settings)
    device = choose_device(worker, index=request.device_index)
    if device.type == "cpu":
        require_compiled()  # now, and not in the first step
        keep_freed_memory()
    # a tensor made in inference mode is never trained
    with torch.inference_mode(False), _told_of_engines_before(model):
        parts = _divide(request, axes, settings, device)
        valueless = take_from_meta(model, device=device)
        flat_optimizer = choose_optimizer(
            settings,
            kind=optimizers,
            client=parts.optimizer,
            module=model,
            model_parameters=parts.model_parameters,
            may_be_empty=axes.pp > 1,
        )
        # before the model changes, so that a user's mistake leaves it as it was
        scheduler = choose_scheduler(settings, request.lr_scheduler, flat_optimizer)
        kind: Callable[..., _Steps | _Stages] = stages if isinstance(model, StagesModule) else steps
        engine = kind(
            model,
            axes=axes,
            config=settings,
            optimizer=flat_optimizer,
            device=device,
            worker=worker,
            divided=parts.divided,
            experts=parts.experts,
        )
        _note_valueless(engine._model, valueless)
        engine.lr_scheduler, engine.collate_fn = scheduler, request.collate_fn
        if request.training_data is not None:
            engine.training_dataloader = engine.deepspeed_io(request.training_data)
    memory = measure_memory(engine)  # a collective: all ranks measure, though only one prints
    if settings.dump_state and engine.global_rank == 0:
        print(json.dumps(summarize(engine, memory), indent=2), flush=True)
    if engine._instruments.metrics is not None and engine.global_rank == 0:
        engine._instruments.metrics.tell_config(summarize(engine, memory))
    checkpointing.configure_from(settings.activation_checkpointing)
    return engine


def _note_valueless(model: ShardedModel, names: frozenset[str]) -> None:
    """Bar the model until parameters and buffers of these names have values."""
    members = [
        (member.name, sub_buffer.true_names(index))
        for unit in model.units
        for sub_buffer in unit.sub_buffers
        for index, member in enumerate(sub_buffer.members)
    ]
    true_names = {name for own, those in members if own in names for name in those}
    model.parked_states.note_valueless(true_names | (names - {own for own, _ in members}))


def read_settings(request: Request, worker: WorkerEnvironment, sizes: MpuSizes | None) -> Config:
    """Read the ds_config, with the axes that the launcher, the model and the program give."""
    model = request.model
    known = earlier_division(model)
    built = model.axes if isinstance(model, StagesModule) else Axes()
    settings = load_config(
        request.config,
        world_size=dist.get_world_size() // built.pp,
        is_lenient=request.is_lenient,
        has_optimizer=request.optimizer is not None,
        tp_size=requested_size(model, size_of_plan(model) if known is None else known.size),
        num_stages=built.pp,
        launched=dict(worker.mesh) | ({"order": worker.mesh_order} if worker.mesh_order else {}),
        sp_size=requested_sequence_size(
            by_mpu=1 if sizes is None else sizes.sp, mesh_param=request.mesh_param, built=built.sp
        ),
        num_data=None if sizes is None else sizes.dp,
    )
    agree_on_division(settings, on_meta=said_of_meta(model))
    return settings


def axes_of_model(model: nn.Module, settings: Config) -> Axes:
    """Return the axes of the job."""
    built = model.axes if isinstance(model, StagesModule) else Axes()
    order = built.order if settings.mesh is None else settings.mesh.order or built.order
    return axes_of_job(
        dist.get_world_size(), pp=built.pp, sp=settings.sp_size, tp=settings.tp_size, order=order
    )


class _Parts(NamedTuple):
    """This rank's parts of a model, and the program's arguments with the new parameters."""

    divided: DividedModel | None
    experts: PlacedExperts
    optimizer: ClientOptimizer | None
    model_parameters: ModelParameters | None


def _divide(request: Request, axes: Axes, settings: Config, device: torch.device) -> _Parts:
    """Divide the model's layers and experts, as the settings say."""
    model, optimizer, model_parameters = request.model, request.optimizer, request.model_parameters
    divided, experts = None, PlacedExperts(model, axes, settings)
    if settings.tensor_parallel is not None:
        check_dtype(model, precision_of(settings).parameters)
        if earlier_division(model) is None:
            check_optimizer(optimizer)
        divided = divide(model, axes, settings.tensor_parallel, device=device)
        optimizer = divided.renew_optimizer(optimizer)
        model_parameters = divided.renew_parameters(model_parameters)
        experts.check_whole(divided.divides)
    if experts.divides_stacks:
        check_optimizer(optimizer)
        experts.divide(device)
    return _Parts(divided, experts, optimizer, model_parameters)


def _check_stages(model: nn.Module, axes: Axes, settings: Config) -> None:
    """Check that a model in stages was built for these axes, and that other models have no
    pipeline section.
    """
    if isinstance(model, StagesModule):
        if not settings.managed_gradient_accumulation:
            raise ConfigError(
                "managed_gradient_accumulation false: train_batch() of a model in stages runs and counts all "
                "its micro batches; leave it out"
            )
        if axes.sp > 1 and _is_arranged_alike(model.axes, axes):
            model.arrange(axes)  # it was built as if ranks that share sequences had data of their own
        if model.axes != axes:
            wanted = dimensions_of(axes)
            raise ConfigError(
                f"the PipelineModule was built for {model.axes.pp} stages x {model.axes.dp} ranks with data "
                f"of their own x {model.axes.sp} parts of each sequence x {model.axes.tp} parts of each "
                f"layer, with the order {', '.join(model.axes.order)} of axes, and the ds_config's "
                f"tensor_parallel.autotp_size is {axes.tp}, its sequence_parallel_size {axes.sp}, and the "
                f"order {', '.join(axes.order)}; build it with "
                f"topology=ProcessTopology(axes={list(wanted)}, dims={list(wanted.values())})"
            )
    elif settings.pipeline is not None and settings.pipeline != PipelineConfig():
        raise ConfigError(
            f"pipeline: {type(model).__name__} is not in stages; build a PipelineModule, or leave this out"
        )


def _is_arranged_alike(built: Axes, axes: Axes) -> bool:
    """Tell whether both axes give ranks the same stages and parts of layers, so that only samples
    may differ.
    """
    places = ([one.coordinates(rank) for rank in range(one.world_size)] for one in (built, axes))
    return (
        built.sp == 1
        and (built.pp, built.tp) == (axes.pp, axes.tp)
        and all(
            (one["pp"], one["tp"]) == (other["pp"], other["tp"]) for one, other in zip(*places, strict=True)
        )
    )


@contextmanager
def _told_of_engines_before(model: nn.Module) -> Iterator[None]:
    """End the earlier engines whose parameters the block takes over. If the block fails after it has taken
    some, mark their engines as lost, and log it.
    """
    locations = map(location_of, model.parameters())
    models = dict.fromkeys(location.model for location in locations if location is not None)
    before = [one for one in models if not one.parked_states.is_taken]  # in the same order on all ranks
    try:
        yield
    except BaseException:
        lost = [one for one in before if one.parked_states.is_taken]
        for one in lost:
            one.parked_states.is_lost = True
        if lost:
            _log.error(
                "initialize() has failed after it had taken over parameters of another engine, which cannot "
                "go on: its gradients, masters and optimizer states are lost; correct what the error says, "
                "call initialize() once more, and load a checkpoint"
            )
        raise
    for one in before:
        end = one.on_taken() if one.parked_states.is_taken else None
        if end is not None:
            end()


def with_precision_of(model: nn.Module, config: Config) -> Config:
    """Enable fp16 for a model that is in float16, if optimizer states are sharded, as DeepSpeed does."""
    kinds = {param.dtype for param in model.parameters() if param.requires_grad and param.is_floating_point()}
    is_said = config.fp16.enabled or config.bf16.enabled or config.torch_autocast.enabled
    policy = policy_for_stage(config.zero.stage)
    if is_said or kinds != {torch.float16} or not policy.is_sharded:
        return config
    _log.warning("the model is float16 and fp16.enabled is not set: it counts as true")
    return config.model_copy(update={"fp16": config.fp16.model_copy(update={"enabled": True})})


def choose_scheduler(config: Config, given: ClientScheduler | None, optimizer: FlatOptimizer | None) -> Any:
    if given is None and config.scheduler is None:
        return None
    if optimizer is None:
        raise ConfigError(
            "there is a scheduler but no optimizer; name one in the ds_config, or give it to initialize()"
        )
    if given is None:
        return None if config.scheduler is None else make_scheduler(config.scheduler, optimizer)
    if config.scheduler is not None:
        _log.info(
            "initialize(lr_scheduler=...) goes before the ds_config's scheduler %s", config.scheduler.type
        )
    if not hasattr(given, "step") or isinstance(given, type):
        return given(optimizer)
    # The groups may have been moved to another optimizer meanwhile, but the dicts are the same.
    groups = getattr(getattr(given, "optimizer", None), "param_groups", optimizer.param_groups)
    if [id(group) for group in groups] != [id(group) for group in optimizer.param_groups]:
        raise ConfigError(
            f"lr_scheduler {type(given).__name__} was made for another optimizer; give initialize() that "
            "optimizer, too, or a callable that makes the scheduler from the engine's"
        )
    return given
