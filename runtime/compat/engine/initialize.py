"""The way in: `initialize()` and `add_config_arguments()`, as DeepSpeed has them."""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from ...comm.process_group import start_process_group
from ...data.loader import Loader
from ...engine.make_engine import ClientScheduler, ConfigSource, Request, make_engine
from ...environment import WorkerEnvironment, read_environment, read_numerics
from ...errors import ConfigError, show_user_errors_in_one_line
from ...log import logger as _log
from ...step.choose_optimizer import ClientOptimizer, ModelParameters
from ..init_distributed import require_process_group
from ..pipeline.module import PipelineModule
from .engines import Engine, PipelineEngine
from .optimizer import DeepSpeedOptimizer


def initialize(  # noqa: PLR0913  (DeepSpeed's signature)
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: ClientOptimizer | None = None,
    model_parameters: ModelParameters | None = None,
    training_data: torch.utils.data.Dataset[Any] | None = None,
    lr_scheduler: ClientScheduler | None = None,
    distributed_port: int = 29500,
    mpu: object | None = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | None = None,
    mesh_param: object | None = None,
    config_params: ConfigSource | None = None,
    *,
    is_lenient: bool = False,
) -> tuple[Engine, DeepSpeedOptimizer | None, Loader | None, Any]:
    """Return (engine, optimizer, dataloader, lr_scheduler); the last three are None where
    nothing asks for one.

    `config` is a path, a dict or base64 of JSON; `args.deepspeed_config` serves in its place.
    `args.device_rank` is the GPU, where that is not what LOCAL_RANK counts to. An optimizer or
    scheduler given here goes before the ds_config's. The model's parameters are placed in flat buffers on
    this worker's device and get rank 0's values.
    `mpu` says how the program arranges its ranks, with Megatron's names of methods; its sequence-parallel
    size, or the numbers of data parallel and of sequence parallel ranks in `mesh_param`, divide sequences
    over neighbours. `UlyssesSPAttentionHF.register_with_transformers()` returns one.
    `is_lenient` is for programs that were written for DeepSpeed, and get it where they `import deepspeed`: of
    the ds_config, a warning names what is not known or says "auto", and a folder without a checkpoint is
    (None, None) to load_checkpoint().
    Order:  every rank must call this
    Errors: ConfigError; uncaught, it ends the program with one line and exit code 2. ImportError on a CPU, if
            this dslaunch was installed where its kernels could not be compiled
    Source: DeepSpeed 0.19.8 deepspeed/__init__.py, `initialize`
    """
    show_user_errors_in_one_line()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize(model={type(model).__name__}): must be a torch.nn.Module")
    request = Request(
        model=model,
        config=_config_source(args, config, config_params),
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
        mpu=mpu,
        mesh_param=mesh_param,
        device_index=getattr(args, "device_rank", None),
        is_lenient=is_lenient,
    )
    worker = read_environment()
    require_process_group(dist_init_required)
    start_process_group(worker, device_index=request.device_index, port=distributed_port)
    new_engine = _make(request, worker)
    engine = cast(Engine, new_engine)
    if engine.optimizer is not None:
        engine.optimizer._mover = weakref.ref(engine)
    engine.mpu = model.mpu() if mpu is None and isinstance(model, PipelineModule) else mpu
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _make(request: Request, worker: WorkerEnvironment) -> Engine | PipelineEngine:
    run = read_numerics()
    if run is None:
        return make_engine(
            request, worker, steps=Engine, stages=PipelineEngine, optimizers=DeepSpeedOptimizer
        )
    from .numerics import make_compared_engine  # what a comparison needs costs every other job a start

    return make_compared_engine(request, worker, run)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config, which `initialize(args=...)` reads."""
    group = parser.add_argument_group("dslaunch", "the ZeRO runtime")
    group.add_argument(
        "--deepspeed", action="store_true", help="train with the engine; for the script's own use"
    )
    group.add_argument("--deepspeed_config", metavar="FILE", help="the ds_config, as JSON, HJSON or YAML")
    return parser


def _config_source(
    args: argparse.Namespace | None, config: ConfigSource | None, config_params: ConfigSource | None
) -> ConfigSource:
    given: dict[str, ConfigSource | None] = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    if given["args.deepscale_config"] is not None:
        _log.warning("args.deepscale_config is DeepSpeed's name of before 2020; give args.deepspeed_config")
    present = {name: value for name, value in given.items() if value is not None}
    if len(present) > 1:
        raise ConfigError(f"{' and '.join(present)} are both given; give the ds_config once")
    if not present:
        raise ConfigError(
            "no ds_config; give initialize(config=...), or start the script with --deepspeed_config FILE"
        )
    return next(iter(present.values()))
