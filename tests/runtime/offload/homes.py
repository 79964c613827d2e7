"""Engines whose values are away between their uses, and whose bits must be those of an engine
that has them at home.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

import dslaunch
from dslaunch.runtime.placement import offload_plan
from tests.runtime.models import Uneven, make_config, make_model

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Where(NamedTuple):
    """A row of the matrix."""

    states: str  # offload_optimizer.device
    parameters: str  # offload_param.device, at stage 3
    is_apart: bool  # the CPU counts as an accelerator
    ratio: float = 1.0


AT_HOME = Where("none", "none", is_apart=False)
AWAY = (
    Where("cpu", "none", is_apart=True),
    Where("none", "cpu", is_apart=True),
    Where("cpu", "cpu", is_apart=True),
    Where("nvme", "none", is_apart=False),
    Where("none", "nvme", is_apart=False),
    Where("nvme", "nvme", is_apart=False),
    Where("nvme", "nvme", is_apart=True),
)


def away_at(stage: int) -> tuple[Where, ...]:
    """Return the rows that differ at a stage: below 3 parameters are always at home."""
    if stage == 3:
        return AWAY
    return tuple({(row.states, row.is_apart): row for row in AWAY if row.states != "none"}.values())


@contextmanager
def pretended(is_apart: bool) -> Iterator[None]:
    """Let the CPU count as an accelerator with memory of its own: all copies are made that a GPU needs."""
    known = offload_plan.has_memory_of_its_own
    if is_apart:
        offload_plan.has_memory_of_its_own = lambda device: True
    try:
        yield
    finally:
        offload_plan.has_memory_of_its_own = known


def make_engine(
    stage: int,
    precision: str,
    where: Where,
    folder: str,
    *,
    kind: type[nn.Module] = Uneven,
    when: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """`when` is added to offload_optimizer."""
    model = make_model(kind)
    config = make_config(**{"stage": stage, **PRECISIONS[precision], "gradient_clipping": 0.3, **changes})
    zero = config["zero_optimization"]
    zero["offload_optimizer"] = {
        "device": where.states,
        "nvme_path": folder,
        "ratio": where.ratio,
        **(when or {}),
    }
    if stage == 3:
        zero["offload_param"] = {"device": where.parameters, "nvme_path": folder}
        zero["stage3_prefetch_bucket_size"] = 600
    with pretended(where.is_apart):
        return dslaunch.initialize(model=model, config=config)[0]
