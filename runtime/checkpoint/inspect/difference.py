"""Differences of two checkpoints: their tensors, their other values, and, if asked for, every number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ...strided import bytes_of, is_strided, kind_of
from ..export.progress_bar import ProgressMeter
from ..files.manifest import digest
from ..files.reader import CheckpointReader

_SETTINGS = (
    "progress",
    "optimizer",
    "scheduler",
    "loss_scale",
    "data",
    "world_size",
    "aliases",
    "left_out",
    "frozen",
    "config",
)
_CHUNK_NUMEL = 1 << 22  # compared at a time: float64 copies of it are made
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Differences of checkpoints A and B. Tensors have their names in a checkpoint: model.<name>,
    optimizer.state.<name>.<state>.
    """

    a: str
    b: str
    only_in_a: tuple[str, ...] = ()
    only_in_b: tuple[str, ...] = ()
    tensors: tuple[dict[str, Any], ...] = ()  # name, a and b: shape and dtype
    settings: tuple[dict[str, Any], ...] = ()  # name, a, b
    # name, num_differing, numel, greatest; the last is the greatest absolute difference, inf where it is NaN
    values: tuple[dict[str, Any], ...] = ()
    num_compared: int = field(default=0)  # tensors whose numbers were compared

    @property
    def is_empty(self) -> bool:
        """Whether there is none."""
        return not (self.only_in_a or self.only_in_b or self.tensors or self.settings or self.values)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return asdict(self)


def difference(a: CheckpointReader, b: CheckpointReader, *, with_values: bool) -> Difference:
    """Compare them; `with_values` reads one tensor of each at a time.

    Errors: CheckpointError if one cannot be read or is damaged
    """
    in_a, in_b = a.tensors(), b.tensors()
    common = [name for name in in_a if name in in_b]
    shapes = [(name, _kind(in_a[name]), _kind(in_b[name])) for name in common]
    same = [name for name, left, right in shapes if left == right]
    return Difference(
        a=a.where,
        b=b.where,
        only_in_a=tuple(sorted(in_a.keys() - in_b.keys())),
        only_in_b=tuple(sorted(in_b.keys() - in_a.keys())),
        tensors=tuple({"name": name, "a": left, "b": right} for name, left, right in shapes if left != right),
        settings=tuple(_settings(a.training(), b.training())),
        values=tuple(_values(a, b, same)) if with_values else (),
        num_compared=len(same) if with_values else 0,
    )


def _kind(found: TensorStorageMetadata) -> dict[str, Any]:
    return {"shape": list(found.size), "dtype": str(found.properties.dtype).removeprefix("torch.")}


# ---- values beside the tensors


def _settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    left = dict(_flat("", {name: a.get(name) for name in _SETTINGS}))
    right = dict(_flat("", {name: b.get(name) for name in _SETTINGS}))
    for name in [*left, *(name for name in right if name not in left)]:
        if left.get(name) != right.get(name):
            yield {"name": name, "a": left.get(name), "b": right.get(name)}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Everything in it by its path, as values that can be compared and printed."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), item)
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in value):
        for index, item in enumerate(value):
            yield from _flat(f"{name}[{index}]", item)
    elif isinstance(value, Tensor):
        yield name, value.tolist() if is_strided(value) else f"{kind_of(value)} {digest(bytes_of(value))}"
    elif isinstance(value, list | tuple | set | frozenset):
        yield name, sorted(map(str, value)) if isinstance(value, set | frozenset) else list(value)
    else:
        yield name, value if isinstance(value, bool | int | float | str | None) else str(value)


# ---- numbers


@torch.no_grad()
def _values(a: CheckpointReader, b: CheckpointReader, names: list[str]) -> Iterator[dict[str, Any]]:
    sizes = {
        name: found.size.numel() * found.properties.dtype.itemsize for name, found in a.tensors().items()
    }
    with ProgressMeter("compared", 2 * sum(sizes[name] for name in names)) as meter:
        for name in names:
            left, right = a.tensor(name).view(-1), b.tensor(name).view(-1)
            meter.advance(2 * sizes[name])
            num_differing, greatest = _compare(left, right)
            if num_differing:
                yield {
                    "name": name,
                    "num_differing": num_differing,
                    "numel": left.numel(),
                    "greatest": greatest,
                }


def _compare(left: Tensor, right: Tensor) -> tuple[int, float]:
    """Return how many elements have other bits, and the largest difference."""
    num_differing, greatest = 0, 0.0
    for piece, other in zip(torch.split(left, _CHUNK_NUMEL), torch.split(right, _CHUNK_NUMEL), strict=True):
        itemsize = min(piece.dtype.itemsize, 8)  # complex128 as two numbers of 8 bytes
        bits = piece.view(_BITS[itemsize]) != other.view(_BITS[itemsize])
        count = int(bits.sum())
        if count:
            num_differing += min(count, piece.numel())
            wide = torch.complex128 if piece.is_complex() else torch.float64
            apart = (piece.to(wide) - other.to(wide)).abs().nan_to_num(nan=inf, posinf=inf)
            greatest = max(greatest, float(apart.max()))
    return num_differing, greatest


# ---- words


def as_text(found: Difference) -> str:
    """Return the difference as text for people."""
    lines = [f"A: {found.a}", f"B: {found.b}"]
    lines += [f"only in A: {name}" for name in found.only_in_a]
    lines += [f"only in B: {name}" for name in found.only_in_b]
    lines += [f"{one['name']}: {_shown(one['a'])} in A, {_shown(one['b'])} in B" for one in found.tensors]
    lines += [f"{one['name']}: {one['a']!r} in A, {one['b']!r} in B" for one in found.settings]
    lines += [
        (
            f"{one['name']}: {one['num_differing']} of {one['numel']} elements differ, by "
            f"{one['greatest']:.3g} at most"
        )
        for one in found.values
    ]
    if found.num_compared:
        lines.append(
            f"{found.num_compared - len(found.values)} of {found.num_compared} tensors have the same bits"
        )
    if found.is_empty:
        lines.append(
            "no difference" if found.num_compared else "no difference; --values compares the numbers, too"
        )
    return "\n".join(lines) + "\n"


def _shown(kind: Mapping[str, Any]) -> str:
    return f"{tuple(kind['shape'])} of {kind['dtype']}"
