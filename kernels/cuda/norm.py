"""The sum of squares on a device."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from .arrays import CUDA, check_one_device, read_array
from .compiler import Program
from .device import Device, cuda_device
from .shards import GRAD_DTYPES
from .steps import TYPE_NAMES
from .table import SMALL, Run, Variant, plan_launches

NUM_PARTIALS = 1024  # blocks, at most, whose sums are added at the end; part of the result
OUT_NUMEL = 1 + NUM_PARTIALS
_COEFFICIENT_BYTES = 4  # NoCoefficients in norm.cu


def squared_norm(
    grads: Iterable[Any],
    *,
    out: Any,
    stream: int,
    device: Device | None = None,
    device_types: Sequence[int] = (CUDA,),
) -> None:
    """Put the sum of squares into `out[0]`; see `dslaunch.kernels.cuda.squared_norm`."""
    arrays = [
        read_array(f"grads[{place}]", grad, dtypes=GRAD_DTYPES, is_written=False, device_types=device_types)
        for place, grad in enumerate(grads)
    ]
    total = read_array("out", out, dtypes=("float64",), is_written=True, device_types=device_types)
    if total.numel != OUT_NUMEL:
        raise ValueError(
            f"out: {total.numel} elements; must be {OUT_NUMEL}, of which the first is the result"
        )
    check_one_device([total, *arrays])
    runs = [Run(variant=Variant(grad=one.dtype), numel=one.numel, grad=one.address) for one in arrays]
    # Always the small table: which chunks share a launch is part of the order of additions.
    launches = plan_launches(runs, coefficient_bytes=_COEFFICIENT_BYTES, sizes=(SMALL,), may_skip_head=False)
    on = device or cuda_device(total.device)
    first = program_of(launches[0].variant if launches else Variant(grad="float32"))
    partials, numel = struct.pack("<Q", total.at(1)), struct.pack("<I", NUM_PARTIALS)
    for program, kernel in [(first, "norm_begin"), (first, "norm_end")]:
        on.prepare(program, kernel)
    for launch in launches:
        on.prepare(program_of(launch.variant), "norm_add")
    on.launch(first, "norm_begin", [partials, numel], num_blocks=1, stream=stream)
    for launch in launches:
        num_blocks = min(launch.num_chunks, NUM_PARTIALS)
        on.launch(
            program_of(launch.variant),
            "norm_add",
            [launch.table, partials],
            num_blocks=num_blocks,
            stream=stream,
        )
    at = struct.pack("<Q", total.address)
    on.launch(first, "norm_end", [partials, numel, at], num_blocks=1, stream=stream)


def program_of(variant: Variant) -> Program:
    """Return the program that adds squares of this dtype."""
    return Program(source="norm", macros=(("DSLAUNCH_GRAD", dict(TYPE_NAMES)[variant.grad]), *SMALL.macros))
