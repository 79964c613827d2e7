"""LAMB on a device: two passes, and between them the norms of each parameter."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..lamb import LambSegment
from .arrays import CUDA, DeviceArray, check_no_shared_memory, check_one_device, read_array
from .compiler import Program
from .device import Device, cuda_device
from .shards import Reading, ReadSegment, Rule, read_shards
from .steps import TYPE_NAMES, WITHOUT_OUT, program_of
from .table import Launch, Run, TableSize, Variant, num_chunks_of, plan_launches

# Values of lamb.cu.
MAX_SEGMENTS = 120
_SEGMENTS = struct.Struct("<II")
_SEGMENT = struct.Struct("<3d2I")
_STEP_SIZE_BYTES = 4  # StepSize in lamb_apply.cu


def step(
    shards: Iterable[Any],
    rule: Rule,
    *,
    bias_correction: bool,
    device_scale: Any,
    allocate: Callable[[int], Any],
    stream: int,
    device: Device | None = None,
    device_types: Sequence[int] = (CUDA,),
) -> None:
    """Apply one step to all shards; see `dslaunch.kernels.cuda.lamb_step`, and `steps.step` for the rest.

    What is allocated: two sums for each segment, a place for its step size, two sums for each chunk.
    """
    reading = read_shards(shards, rule, device_scale=device_scale, device_types=device_types)
    if not reading.runs:
        return
    _check_one_piece(reading)
    on = device or cuda_device(reading.device or 0)
    directions = plan_launches(
        [_direction_of(run) for run in reading.runs],
        coefficient_bytes=reading.coefficient_bytes,
        sizes=on.table_sizes,
        factor=reading.factor,
        may_skip_head=False,  # the begin of a chunk is part of the order of additions
    )
    first = [program_of(rule, launch.variant, launch.size) for launch in directions]
    num_segments = len(reading.segments)
    numel = 3 * num_segments + 2 * sum(launch.num_chunks for launch in directions)
    scratch = _read_scratch(allocate(numel), numel, reading, device_types)
    sums, step_sizes, of_chunks = scratch.address, scratch.at(2 * num_segments), scratch.at(3 * num_segments)
    applies = plan_launches(
        [_apply_of(run, step_sizes + run.segment * _STEP_SIZE_BYTES) for run in reading.runs],
        coefficient_bytes=_STEP_SIZE_BYTES,
        sizes=on.table_sizes,
        factor=reading.factor,
    )
    second = [apply_program(launch.variant.param_out, launch.size) for launch in applies]
    for program, kernels in [
        *((one, ("lamb_directions", "lamb_step_sizes")) for one in first),
        *((one, ("lamb_apply",)) for one in second),
    ]:
        for kernel in kernels:
            on.prepare(program, kernel)
    at = of_chunks
    for program, launch in zip(first, directions, strict=True):
        num_blocks = min(launch.num_chunks, on.num_blocks)
        on.launch(
            program, "lamb_directions", [launch.table, _pointer(at)], num_blocks=num_blocks, stream=stream
        )
        at += launch.num_chunks * 2 * 8
    pointers = [_pointer(of_chunks), _pointer(sums), _pointer(step_sizes)]
    for table, count in segment_tables(reading.segments, directions, bias_correction=bias_correction):
        num_blocks = min(count, on.num_blocks)
        on.launch(first[0], "lamb_step_sizes", [table, *pointers], num_blocks=num_blocks, stream=stream)
    for program, launch in zip(second, applies, strict=True):
        num_blocks = min(launch.num_chunks, on.num_blocks)
        on.launch(program, "lamb_apply", [launch.table], num_blocks=num_blocks, stream=stream)


def apply_program(param_out: str | None, size: TableSize) -> Program:
    """Return the program of the second pass, for a copy of this dtype."""
    name = dict(TYPE_NAMES)[param_out] if param_out else WITHOUT_OUT
    return Program(source="lamb_apply", macros=(("DSLAUNCH_PARAM_OUT", name), *size.macros))


def segment_tables(
    segments: Sequence[ReadSegment], directions: Sequence[Launch], *, bias_correction: bool
) -> list[tuple[bytes, int]]:
    """Return the tables of all segments, and how many each has; chunks are counted through the launches."""
    chunks: dict[int, tuple[int, int]] = {}
    behind = 0
    for launch in directions:
        for run in launch.runs:
            count = num_chunks_of(run.numel, 0)
            chunks[run.segment] = (behind, count)
            behind += count
    tables = []
    for start in range(0, len(segments), MAX_SEGMENTS):
        some = segments[start : start + MAX_SEGMENTS]
        packed = _SEGMENTS.pack(start, len(some)) + b"".join(
            _SEGMENT.pack(*_scales(one.source, bias_correction), *chunks.get(start + place, (0, 0)))
            for place, one in enumerate(some)
        )
        tables.append((packed.ljust(_SEGMENTS.size + MAX_SEGMENTS * _SEGMENT.size, b"\0"), len(some)))
    return tables


def _scales(segment: LambSegment, bias_correction: bool) -> tuple[float, float, float]:
    """Return what lamb_step_size in kernels/lamb.h needs, in double."""
    beta1, beta2, step = segment.beta1, segment.beta2, segment.step
    correction = math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step) if bias_correction else 1.0
    return segment.lr * correction, segment.min_coeff, segment.max_coeff


def _direction_of(run: Run) -> Run:
    """The first pass writes the direction in place of a copy."""
    return replace(run, variant=replace(run.variant, param_out="float32"), param_out=run.update)


def _apply_of(run: Run, step_size: int) -> Run:
    """The second reads it as a gradient, and its step size where a state would be."""
    variant = Variant(grad="float32", param_out=run.variant.param_out)
    return replace(run, variant=variant, grad=run.update, states=(step_size, 0), coefficients=b"")


def _check_one_piece(reading: Reading) -> None:
    for run, other in zip(reading.runs, reading.runs[1:], strict=False):
        if run.segment == other.segment:
            raise ValueError(
                f"{reading.segments[run.segment].name}: several pieces of the gradient; on a device LAMB "
                "takes the gradient of a segment in one piece: join them"
            )


def _read_scratch(source: Any, numel: int, reading: Reading, device_types: Sequence[int]) -> DeviceArray:
    scratch = read_array(
        "allocate()", source, dtypes=("float64",), is_written=True, device_types=device_types
    )
    if scratch.numel != numel:
        raise ValueError(f"allocate(): {scratch.numel} elements; must be the {numel} that it was asked for")
    check_one_device([*reading.arrays, scratch])
    check_no_shared_memory([*reading.arrays, scratch])
    return scratch


def _pointer(address: int) -> bytes:
    return struct.pack("<Q", address)
