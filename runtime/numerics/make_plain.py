"""Construction of a plain engine from a program's arguments."""

from __future__ import annotations

from typing import TypeVar

import torch

from ..activation import checkpointing
from ..comm.process_group import choose_device
from ..config import Config
from ..engine.make_engine import Request, axes_of_model, choose_scheduler, read_settings, with_precision_of
from ..environment import WorkerEnvironment
from ..errors import ConfigError
from ..mesh.mpu import read_mpu
from ..pipeline.module import StagesModule
from ..placement.precision import precision_of
from ..step.choose_optimizer import choose_optimizer
from ..step.flat_optimizer import FlatOptimizer
from ..tensor.lower import size_of_plan
from .plain_engines import PlainStages, PlainSteps

_Steps = TypeVar("_Steps", bound=PlainSteps)
_Stages = TypeVar("_Stages", bound=PlainStages)


def make_plain_engine(
    request: Request,
    worker: WorkerEnvironment,
    *,
    steps: type[_Steps],
    stages: type[_Stages],
    optimizers: type[FlatOptimizer],
) -> _Steps | _Stages:
    """Return an engine that trains the whole model on every rank: of the class `stages` for a model in
    stages, else of the class `steps`.

    Order:  every rank must call this, once there is a process group
    Errors: ConfigError for a model that the program itself has divided, and for values that are rounded at
            random
    """
    model = request.model
    sizes = None if request.mpu is None else read_mpu(request.mpu)
    if size_of_plan(model) > 1:
        raise ConfigError(
            "dslaunch numerics: the program has divided the model's layers over ranks by itself, so that no "
            "rank can have the whole; compare with stage 0: dslaunch numerics --reference stage0"
        )
    settings = read_settings(request, worker, sizes)
    _check_kept(settings)
    axes = axes_of_model(model, settings)
    if request.is_lenient:
        settings = with_precision_of(model, settings)
    if isinstance(model, StagesModule) and model.axes != axes:
        model.arrange(axes)
    device = choose_device(worker, index=request.device_index)
    with torch.inference_mode(False):
        shown = choose_optimizer(
            settings,
            kind=optimizers,
            client=request.optimizer,
            module=model,
            model_parameters=request.model_parameters,
        )
        scheduler = choose_scheduler(settings, request.lr_scheduler, shown)
        kind = stages if isinstance(model, StagesModule) else steps
        engine = kind(model, axes=axes, config=settings, optimizer=shown, device=device, worker=worker)
        engine.lr_scheduler, engine.collate_fn = scheduler, request.collate_fn
        if request.training_data is not None:
            engine.training_dataloader = engine.deepspeed_io(request.training_data)
    checkpointing.configure_from(settings.activation_checkpointing)
    return engine


def _check_kept(settings: Config) -> None:
    precision = precision_of(settings)
    if torch.float32 == precision.masters == precision.states:
        return
    raise ConfigError(
        "dslaunch numerics: the ds_config keeps masters or optimizer states in fewer bits than float32, "
        "rounded at random, and plain torch keeps float32; leave data_types.master_dtype, "
        "data_types.optimizer_state_dtype and bf16's keys for them out for the comparison, or compare with "
        "stage 0: dslaunch numerics --reference stage0"
    )
