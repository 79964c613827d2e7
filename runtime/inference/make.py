"""Construction of an engine for inference."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.process_group import start_process_group
from ..engine.make_engine import Request, make_engine
from ..engine.stages_engine import StagesEngine
from ..environment import read_environment
from ..errors import ConfigError
from ..pipeline.module import StagesModule
from ..step.flat_optimizer import FlatOptimizer
from ..tensor.model_init import tp_model_init
from ..zero.parameters.early_parameter import early_of
from .engine import InferenceEngine
from .options import InferenceOptions
from .speedups import facts_of, plan_speedups
from .words import in_words_of_inference

_log = logging.getLogger("dslaunch")
_DTYPES = (None, torch.float32, torch.float16, torch.bfloat16)


def make_inference_engine(model: nn.Module, options: InferenceOptions) -> InferenceEngine:
    """Return an engine for this model, in evaluation mode, with the values of rank 0 or of a checkpoint.

    Order:  every rank must call this
    Errors: ConfigError; CheckpointError for a checkpoint that does not fit
    """
    _check_model(model, options)
    worker = read_environment()
    start_process_group(worker)
    _check_size(options)
    if options.tp_group is not None:
        tp_model_init(model, options.tp_size, tp_group=options.tp_group)
    _convert(model, options)
    request = Request(model=model, config=options.ds_config(), mpu=options.mpu, is_lenient=options.is_lenient)
    with in_words_of_inference():
        engine: Any = make_engine(
            request, worker, steps=InferenceEngine, stages=StagesEngine, optimizers=FlatOptimizer
        )
    made: InferenceEngine = engine
    speedups = plan_speedups(options, facts_of(model, options, made.device))
    if speedups.attention is not None:
        model.set_attn_implementation(speedups.attention)  # type: ignore[operator]
    made.prepare(options, speedups)
    if options.checkpoint is not None:
        made.load_weights(options.checkpoint)
        _take_generation_config(model, Path(options.checkpoint))
    if options.save_path is not None:
        made.save_16bit_model(options.save_path, "model.safetensors")
    if speedups.notes and made.global_rank == 0:
        _log.warning("init_inference: %s", "; ".join(speedups.notes))
    return made


def _check_model(model: Any, options: InferenceOptions) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"init_inference(model={type(model).__name__}): must be a torch.nn.Module; of a pipeline give "
            "the model inside, as pipe.model = init_inference(pipe.model)"
        )
    if isinstance(model, StagesModule):
        raise ConfigError(
            "init_inference() was given a model in stages, which does not generate; give the model as it is "
            "without PipelineModule, and tensor_parallel.tp_size to divide it"
        )
    if options.dtype not in _DTYPES:
        raise ConfigError(
            f"init_inference(dtype={options.dtype}): must be torch.float32, torch.float16 or torch.bfloat16; "
            "nothing is quantized here. Where memory is short give torch.bfloat16, and tp_size, "
            'offload="cpu" or offload="nvme"; vLLM and SGLang serve quantized models'
        )


def _check_size(options: InferenceOptions) -> None:
    world_size = dist.get_world_size()
    if world_size % options.tp_size:
        raise ConfigError(
            f"init_inference(tensor_parallel.tp_size={options.tp_size}): {world_size} ranks are no multiple "
            "of it; start as many ranks, or a multiple, each group of which then has a copy of the model"
        )


def _convert(model: nn.Module, options: InferenceOptions) -> None:
    """Make a float32 model; 16-bit ones are made part by part, as their parameters are placed."""
    if options.dtype is not torch.float32:
        return
    others = [
        (name, param)
        for name, param in model.named_parameters()
        if param.is_floating_point() and param.dtype is not torch.float32
    ]
    for name, param in others:
        if early_of(param) is not None:
            raise ConfigError(
                f"init_inference(dtype=torch.float32): parameter '{name}' was made in {param.dtype} inside "
                "zero.Init(); leave dtype out, or make the model in float32 there"
            )
    if others:
        model.float()


def _take_generation_config(model: Any, folder: Path) -> None:
    """Let a model of transformers that was made from its config have what a folder says of its `generate`, as
    from_pretrained() does.
    """
    made = getattr(model, "generation_config", None)
    if getattr(made, "_from_model_config", False) and (folder / "generation_config.json").is_file():
        kind: Any = type(made)
        model.generation_config = kind.from_pretrained(folder)
