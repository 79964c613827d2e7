"""Whole weights from a checkpoint, for other programs: one tensor in memory at a time,
and for .bin one file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..storage.url_store import open_store
from .output import OutputFiles
from .output_plan import BIN, DEFAULT_SHARD_SIZE, SAFETENSORS, OutputPlan, Spec, plan_output
from .progress_bar import ProgressMeter
from .source import Source

FILE_NAMES = {"safetensors": f"model{SAFETENSORS}", "bin": f"pytorch_model{BIN}"}
_log = logging.getLogger("dslaunch")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of an export. Tensors without floating-point numbers keep their dtype."""

    dtype: torch.dtype = torch.float32
    file_name: str = FILE_NAMES["safetensors"]  # its ending tells the format
    max_shard_size: int | str | None = DEFAULT_SHARD_SIZE
    exclude_frozen_parameters: bool = False


def export(source: Source, out: str | os.PathLike[str], options: ExportOptions) -> OutputPlan:
    """Write the weights of a checkpoint into the folder or URL `out`; return what was written.

    Names that are tied have one tensor. A safetensors file holds it once, under the name that the model
    gives first, and lists the others in its metadata: transformers ties them again and does not miss
    them, and warns of tensors that are there twice when it writes. What torch.save writes has all names,
    and the numbers once.
    Errors: CheckpointError if the checkpoint is damaged, `out` cannot be written,
            or a number is too large for float16
    """
    specs, aliases = _selected(source, options)
    plan = plan_output(
        specs, aliases=aliases, file_name=options.file_name, max_shard_size=options.max_shard_size
    )
    meter = ProgressMeter(f"export to {os.fspath(out)}", plan.num_bytes)
    with meter, OutputFiles(open_store(out), plan) as output:
        for name in plan.order():
            output.put(name, _converted(name, source.tensor(name), specs[name].dtype))
            meter.advance(specs[name].num_bytes)
    return plan


def select(source: Source, *, exclude_frozen_parameters: bool) -> tuple[list[str], dict[str, str]]:
    """Return the names that are wanted, and the other names of those."""
    left_out = source.frozen() if exclude_frozen_parameters else frozenset()
    names = [name for name in source.names() if name not in left_out]
    if not names:
        raise CheckpointError(f"{source.where} holds no weights{' that were trained' if left_out else ''}")
    kept = set(names)
    return names, {other: name for other, name in source.aliases().items() if name in kept}


def _selected(source: Source, options: ExportOptions) -> tuple[Mapping[str, Spec], dict[str, str]]:
    names, aliases = select(source, exclude_frozen_parameters=options.exclude_frozen_parameters)
    all_specs, kept = source.names(), source.kept_dtypes()
    specs = {}
    for name in names:
        shape, dtype = all_specs[name]
        is_converted = dtype.is_floating_point and name not in kept
        specs[name] = Spec(tuple(shape), options.dtype if is_converted else dtype)
    return specs, aliases


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    converted = tensor.to(dtype)
    if dtype == torch.float16 and bool((converted.isinf() & ~tensor.isinf()).any()):
        greatest = float(tensor.abs().nan_to_num(posinf=0.0).max())
        raise CheckpointError(
            f"{name} has numbers up to {greatest:g}, and float16 ends at 65504; export bfloat16 or float32"
        )
    return converted
