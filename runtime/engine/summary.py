"""Output of `dump_state` at the start: the model, the devices, the batch sizes,
and the whole configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config.pipeline import PipelineConfig
from ..metrics.memory_by_place import memory_by_place
from ..step.fused_rule import FusedRule
from ..zero.units.unit import Unit
from .base import EngineBase
from .stages_engine import StagesEngine


def summarize(engine: EngineBase, memory: list[dict[str, Any]]) -> dict[str, Any]:
    """Return facts about the run in JSON's types; "ds_config" is what `load_config` reads back
    as the same Config. `memory` is the memory that the ranks hold, by their places.

    Units: counts of parameters are elements
    """
    config, policy = engine.settings, engine._policy
    parameters = list(engine.parameters())  # a freed parameter keeps its shape
    scheduler = engine.lr_scheduler
    return {
        "config_from": config.origin.name,
        "num_ranks": engine.world_size,
        "device": str(engine.device),
        "num_params": sum(param.numel() for param in parameters),
        "num_trained_params": sum(param.numel() for param in parameters if param.requires_grad),
        "dtypes": sorted({str(param.dtype).removeprefix("torch.") for param in parameters}),
        "batch": (
            f"{config.train_batch_size} samples for one optimizer step = {config.micro_batch_size} in a "
            f"micro batch * {config.gradient_accumulation_steps} micro batches * {engine.dp_world_size} ranks"
        ),
        "zero": {
            "stage": policy.stage,
            "parameters": policy.parameters.value + _exceptions(engine),
            "gradients": policy.gradients.value,
            "optimizer_states": policy.optimizer.value,
        },
        "memory": memory,
        "optimizer": None if engine.optimizer is None else engine.optimizer.rule.name,
        "lr_scheduler": None if scheduler is None else type(scheduler).__name__,
        "ds_config": config.describe(),
    }


def measure_memory(engine: EngineBase) -> list[dict[str, Any]]:
    """Return the memory that the ranks hold, by their places.

    Order: a collective where ranks have places
    """
    optimizer, how = engine.optimizer, engine.settings.pipeline or PipelineConfig()
    units: Sequence[Unit] = engine._held_units() if isinstance(engine, StagesEngine) else ()
    return memory_by_place(
        engine._model,
        has_states=optimizer is None or isinstance(optimizer.rule, FusedRule),
        whole_units=units,
        has_whole_gradients=isinstance(engine, StagesEngine) and how.reduce == "batch",
    )


def _exceptions(engine: EngineBase) -> str:
    """Return a text about parameters that stay whole although parameters are sharded over several ranks."""
    whole = engine._model.num_small
    return f", but {whole:,} elements, in units of small parameters" if whole else ""
