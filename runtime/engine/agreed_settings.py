"""Settings of a ds_config that must be the same on all ranks, so that all train alike, in one order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import Config
from ..step.flat_optimizer import FlatOptimizer

_AGREED = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "max_skipped_steps",
    "rerun_outliers",
    "dataloader_drop_last",
    "optimizer",
    "scheduler",
    "bf16",
    "fp16",
    "communication_data_type",
    "data_types",
    "torch_autocast",
    "zero_optimization",
    "checkpoint",
    "pipeline",
    "sequence",
    "use_data_before_expert_parallelism",
)
_OWN = ("nvme_path", "pin_memory")  # keys of offload: each host has its own values


def agreed_settings(config: Config, optimizer: FlatOptimizer | None) -> dict[str, Any]:
    """Return these settings by dotted key, and the kind of the optimizer.

    Other settings may differ by rank: what it prints and measures, its folders, its batch size.
    """
    chosen = {key: value for key, value in config.describe().items() if key in _AGREED}
    flat = {key: value for key, value in _flat(chosen) if key.rpartition(".")[2] not in _OWN}
    return {**flat, "optimizer": None if optimizer is None else optimizer.rule.name}


def _flat(section: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    settings: list[tuple[str, Any]] = []
    for key, value in section.items():
        settings += (
            _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else [(f"{above}{key}", value)]
        )
    return settings
