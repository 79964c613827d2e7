"""Distribution of tensors to files of a folder of weights, in the layout that Hugging Face's loaders read.

Arithmetic only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...errors import CheckpointError

SAFETENSORS, BIN = ".safetensors", ".bin"
DEFAULT_SHARD_SIZE = "5GB"
_UNITS = {
    **{"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40},
}


class Spec(NamedTuple):
    """A tensor that is not here yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        """Number of bytes in host memory."""
        return self.numel * self.dtype.itemsize


def shard_bytes(size: int | str | None) -> int | None:
    """Return the bytes that `5GB`, `200MiB` or a number mean; None is no limit.

    Errors: CheckpointError
    """
    if size is None:
        return None
    match = re.fullmatch(r"([0-9]+)\s*([KMGT]?I?B)?", str(size).strip().upper())
    number = int(match[1]) * _UNITS[match[2] or ""] if match and (match[2] or "") in _UNITS else 0
    if number < 1:
        raise CheckpointError(
            f"max_shard_size {size!r} is no size; write a number of bytes above 0, or e.g. "
            "'5GB', '200MB', '1GiB'"
        )
    return number


def size_text(num_bytes: int) -> str:
    """Return it with three digits, in powers of 1000 as disks are sold and `max_shard_size` is written."""
    size, unit = float(num_bytes), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.3g} {unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """One file of the folder."""

    name: str
    specs: Mapping[str, Spec]  # its tensors, in the order in which they are written

    @property
    def num_bytes(self) -> int:
        """Number of bytes of its tensors."""
        return sum(spec.num_bytes for spec in self.specs.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """All files. `kept` stands for an alias: a loader that ties the names itself finds the tensor there."""

    stem: str  # stem of the names: model, pytorch_model
    suffix: str  # SAFETENSORS, or another for what torch.save writes
    files: tuple[OutputFile, ...]
    aliases: Mapping[str, str]  # other name -> the name that the files have

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(file.num_bytes for file in self.files)

    @property
    def index_name(self) -> str | None:
        """The file that says which tensor is where; None if there is one file only."""
        return f"{self.stem}{self.suffix}.index.json" if len(self.files) > 1 else None

    @property
    def is_safetensors(self) -> bool:
        """False for the format of torch.save."""
        return self.suffix == SAFETENSORS

    def summary(self) -> str:
        """Return a description of the output, for people."""
        specs = [spec for file in self.files for spec in file.specs.values()]
        dtypes = sorted({str(spec.dtype).removeprefix("torch.") for spec in specs})
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        tied = f", {len(self.aliases)} more by another name" if self.aliases else ""
        return f"{files}, {len(specs)} tensors ({', '.join(dtypes)}){tied}, {size_text(self.num_bytes)}"

    def order(self) -> list[str]:
        """Return the names in the order in which they have to be written."""
        return [name for file in self.files for name in file.specs]

    def index(self) -> dict[str, object]:
        """Return the content of the index."""
        file_of = {name: file.name for file in self.files for name in file.specs}
        if not self.is_safetensors:
            file_of |= {other: file_of[name] for other, name in self.aliases.items()}
        return {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(file_of.items()))}

    def is_stale(self, name: str) -> bool:
        """Whether a file of this name is from another export to the same place,
        and would be taken for a part of this.
        """
        ours = {file.name for file in self.files} | {self.index_name}
        return self.has_shape(name) and name not in ours

    def has_shape(self, name: str) -> bool:
        """Whether an export to the same place could have a file of this name."""
        shape = rf"{re.escape(self.stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(self.suffix)}(\.index\.json)?"
        return re.fullmatch(shape, name) is not None


def plan_output(
    specs: Mapping[str, Spec], *, aliases: Mapping[str, str], file_name: str, max_shard_size: int | str | None
) -> OutputPlan:
    """Spread tensors over files of at most `max_shard_size`; one that is larger has a file of its own.

    In each file tensors of 8 bytes an element come first, then those of 4, 2 and 1: then each begins
    at a multiple of its elements' size, whatever the mix, which is what lets a safetensors file be
    mapped into memory.
    Errors: CheckpointError for a size that is none
    """
    limit = shard_bytes(max_shard_size)
    shards: list[dict[str, Spec]] = [{}]
    filled = 0
    for name in sorted(specs, key=lambda name: -specs[name].dtype.itemsize):  # stable
        size = specs[name].num_bytes
        if shards[-1] and limit is not None and filled + size > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = specs[name]
        filled += size
    stem, dot, end = file_name.rpartition(".")
    suffix = dot + end
    names = [file_name]
    if len(shards) > 1:
        names = [f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}" for number in range(1, len(shards) + 1)]
    files = tuple(OutputFile(name=name, specs=held) for name, held in zip(names, shards, strict=True))
    return OutputPlan(stem=stem, suffix=suffix, files=files, aliases=dict(aliases))
