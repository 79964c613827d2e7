"""One optimizer step on a device: read the arguments, plan, launch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .arrays import CUDA
from .compiler import Program
from .device import Device, cuda_device
from .shards import Rule, read_shards
from .table import TableSize, Variant, plan_launches

KERNEL = "optimizer_step"
WITHOUT_OUT = "Nothing"
TYPE_NAMES = (("float32", "float"), ("bfloat16", "bfloat16"), ("float16", "float16"))


def step(
    shards: Iterable[Any],
    rule: Rule,
    *,
    device_scale: Any,
    stream: int,
    device: Device | None = None,
    device_types: Sequence[int] = (CUDA,),
) -> None:
    """Apply one step of `rule` to all shards; `device` is the one that they are on.

    Nothing is launched before all is checked and every kernel is compiled.
    """
    reading = read_shards(shards, rule, device_scale=device_scale, device_types=device_types)
    if not reading.runs:
        return
    on = device or cuda_device(reading.device or 0)
    launches = plan_launches(
        reading.runs,
        coefficient_bytes=reading.coefficient_bytes,
        sizes=on.table_sizes,
        factor=reading.factor,
    )
    programs = [program_of(rule, launch.variant, launch.size) for launch in launches]
    for program in programs:
        on.prepare(program, KERNEL)
    for program, launch in zip(programs, launches, strict=True):
        num_blocks = min(launch.num_chunks, on.num_blocks)
        on.launch(program, KERNEL, [launch.table], num_blocks=num_blocks, stream=stream)


def program_of(rule: Rule, variant: Variant, size: TableSize) -> Program:
    """Return the program that updates arrays of these dtypes."""
    names = dict(TYPE_NAMES)
    return Program(
        source=rule.source,
        macros=(
            ("DSLAUNCH_GRAD", names[variant.grad]),
            ("DSLAUNCH_STATE", names[variant.state or "float32"]),
            ("DSLAUNCH_PARAM_OUT", names[variant.param_out] if variant.param_out else WITHOUT_OUT),
            ("DSLAUNCH_MODE", str(variant.mode)),
            *size.macros,
        ),
    )


def read_grad_scale(grad_scale: float) -> float:
    """Refuse a factor that would spoil every element."""
    if not math.isfinite(grad_scale):
        raise ValueError(f"grad_scale: {grad_scale:.15g}; must be finite")
    return grad_scale
