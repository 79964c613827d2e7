"""Places of each tensor's elements in a DeepSpeed checkpoint. Arithmetic, and one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from .folder import DeepSpeedFolder

MASTER = "master"  # the float32 weights
_FLAT_MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups")


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Elements of a tensor that follow each other."""

    start: int  # the first of them, counted in the tensor
    numel: int
    values: Callable[[], Tensor]  # [numel], on the disk until they are used


@dataclass(frozen=True, slots=True)
class TensorPieces:
    """A tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[TensorPiece, ...]

    def copy_to(self, start: int, out: Tensor) -> None:
        """Write the elements from `start` on into `out`, as many as it has, rounded if its dtype is another.

        Shapes: out [n]
        """
        for piece, low, high in self._parts(start, out.numel()):
            out[low - start : high - start].copy_(piece.values()[low - piece.start : high - piece.start])

    def check(self, start: int, numel: int) -> None:
        """Check that the files have these elements.

        Errors: CheckpointError
        """
        for piece, _, _ in self._parts(start, numel):
            found = piece.values().numel()
            if found != piece.numel:
                raise CheckpointError(
                    f"a tensor of shape {self.shape} has {found} elements where {piece.numel} belong; the "
                    "checkpoint is damaged: load another one"
                )

    def _parts(self, start: int, numel: int) -> Iterator[tuple[TensorPiece, int, int]]:
        for piece in self.pieces:
            low, high = max(start, piece.start), min(start + numel, piece.start + piece.numel)
            if low < high:
                yield piece, low, high

    def whole(self) -> Tensor:
        """Return the whole tensor, in host memory of its own."""
        out = torch.empty(prod(self.shape), dtype=self.dtype, device="cpu")
        self.copy_to(0, out)
        return out.view(self.shape)


def whole_tensor(value: Tensor, shape: Sequence[int] | None = None) -> TensorPieces:
    """Return a tensor that is in one piece."""
    flat = value.detach().reshape(-1)
    return TensorPieces(
        tuple(value.shape if shape is None else shape),
        value.dtype,
        (TensorPiece(0, flat.numel(), lambda: flat),),
    )


Found = dict[str, dict[str, TensorPieces]]  # parameter -> master and states -> where they are


def flat_partitions(folder: DeepSpeedFolder, shapes: Sequence[Mapping[str, Sequence[int]]]) -> Found:
    """Return masters and states of stages 1 and 2.

    The parameters of a group lie behind each other, with padding between them if they are aligned; every
    rank has an equal part of that, the padding at the end left away. So where rank 0 has less than the
    others, it has all.
    Source: DeepSpeed 0.19.8 runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py, `state_dict`
    """
    first = folder.optimizer(0)
    paddings = first.get("param_alignment_paddings")
    parameters: Found = {}
    for group, members in enumerate(shapes):
        own = _flats(first, group)
        offset = 0
        for number, (name, shape) in enumerate(members.items()):
            numel = prod(shape)
            spans = list(
                _spans(offset, numel, size=own[MASTER].numel(), num_ranks=folder.num_optimizer_files)
            )
            parameters[name] = {
                kind: TensorPieces(
                    tuple(shape),
                    flat.dtype,
                    tuple(
                        TensorPiece(start, count, partial(_slice, folder, rank, group, kind, low, count))
                        for start, count, rank, low in spans
                    ),
                )
                for kind, flat in own.items()
            }
            offset += numel + (paddings[group][number] if paddings is not None else 0)
    return parameters


def sharded_parameters(folder: DeepSpeedFolder, shapes: Sequence[Mapping[str, Sequence[int]]]) -> Found:
    """Return masters and states of stage 3.

    There each parameter has its own equal parts, the last one padded, and a group is cut into several: one
    for each of `shapes`.
    Source: DeepSpeed 0.19.8 runtime/zero/stage3.py, `_rigid_state_dict`
    """
    first, num_ranks = folder.optimizer(0), folder.num_optimizer_files
    parameters: Found = {}
    for group, members in enumerate(shapes):
        own = _flats(first, group)
        offset = 0
        for name, shape in members.items():
            numel = prod(shape)
            part = ceil(numel / num_ranks)
            parameters[name] = {
                kind: TensorPieces(
                    tuple(shape),
                    flat.dtype,
                    tuple(
                        TensorPiece(
                            rank * part, count, partial(_slice, folder, rank, group, kind, offset, count)
                        )
                        for rank in range(num_ranks)
                        if (count := min(part, numel - rank * part)) > 0
                    ),
                )
                for kind, flat in own.items()
            }
            offset += part
        if offset != own[MASTER].numel():
            raise CheckpointError(
                f"{folder.path}: group {group} of the optimizer has {own[MASTER].numel()} elements on rank 0 "
                f"and its parameters have {offset}; the checkpoint is damaged: load another one"
            )
    return parameters


def frozen_fragments(folder: DeepSpeedFolder, shapes: Mapping[str, Sequence[int]]) -> dict[str, TensorPieces]:
    """Return what stage 3 does not train: parts as those of `sharded_parameters`,
    in the files of the model.
    """
    fragments = {}
    for name, shape in shapes.items():
        numel = prod(shape)
        part = ceil(numel / folder.num_model_files)
        fragments[name] = TensorPieces(
            tuple(shape),
            folder.model(0)["frozen_param_fragments"][name].dtype,
            tuple(
                TensorPiece(rank * part, count, partial(_fragment, folder, rank, name, count))
                for rank in range(folder.num_model_files)
                if (count := min(part, numel - rank * part)) > 0
            ),
        )
    return fragments


def universal_parameters(folder: DeepSpeedFolder, shapes: Sequence[Mapping[str, Sequence[int]]]) -> Found:
    """Return masters and states of a universal checkpoint: whole, with or without their shapes."""
    parameters: Found = {}
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        kinds = [kind for kind in folder.universal_kinds(name) if kind != "step"]
        if "fp32" not in kinds:
            raise CheckpointError(
                f"{folder.path}/zero/{name}/fp32.pt is missing: the checkpoint is damaged; convert it again"
            )
        parameters[name] = {}
        for kind in kinds:
            values = partial(_universal, folder, name, kind)
            piece = TensorPiece(0, prod(shape), values)
            parameters[name][MASTER if kind == "fp32" else kind] = TensorPieces(
                tuple(shape), values().dtype, (piece,)
            )
    return parameters


def base_optimizer(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what torch's optimizer said of itself; of its parameters, which are flat groups,
    there are numbers.
    """
    inner = state.get("optimizer_state_dict", state.get("base_optimizer_state", state))
    if isinstance(inner, list):  # an elastic checkpoint's, of states alone
        return {"state": dict(enumerate(inner))}
    base: Mapping[str, Any] = inner
    return base


def _spans(offset: int, numel: int, *, size: int, num_ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut elements [offset, offset + numel) of a group by ranks: first one in the parameter, count,
    rank, first one there.
    """
    at = offset
    while at < offset + numel:
        rank = min(at // size, num_ranks - 1) if size else 0
        count = min(offset + numel, (rank + 1) * size) - at
        if count <= 0:
            raise CheckpointError(
                f"a group of the optimizer has {size} elements on each of {num_ranks} ranks, and its "
                f"parameters go on to {offset + numel}; the checkpoint is damaged: load another one"
            )
        yield at - offset, count, rank, at - rank * size
        at += count


def _flats(state: Mapping[str, Any], group: int) -> dict[str, Tensor]:
    """Return a rank's part of a group: masters, and states with a number for each of them."""
    masters = next(state[key] for key in _FLAT_MASTERS if key in state)
    base = base_optimizer(state)
    numbers = [number for one in base.get("param_groups", ()) for number in one["params"]]
    own = base["state"].get(numbers[group] if numbers else group, {})
    states = {kind: value for kind, value in own.items() if isinstance(value, Tensor) and value.ndim > 0}
    return {MASTER: masters[group], **states}


def _slice(folder: DeepSpeedFolder, rank: int, group: int, kind: str, low: int, count: int) -> Tensor:
    flat = _flats(folder.optimizer(rank), group).get(kind)
    if flat is None or flat.numel() < low + count:
        has = "nothing" if flat is None else f"{flat.numel()} elements"
        raise CheckpointError(
            f"{folder.path}: rank {rank} has {has} of '{kind}' in group {group} of the optimizer, and "
            f"{low + count} elements are wanted; the checkpoint is damaged: load another one"
        )
    return flat.detach().view(-1)[low : low + count]


def _fragment(folder: DeepSpeedFolder, rank: int, name: str, count: int) -> Tensor:
    fragment: Tensor = folder.model(rank)["frozen_param_fragments"][name]
    return fragment.detach().view(-1)[:count]


def _universal(folder: DeepSpeedFolder, name: str, kind: str) -> Tensor:
    value = folder.universal(name, kind)
    tensor: Tensor = value["param"] if isinstance(value, dict) else value
    return tensor.detach().reshape(-1)


_ADVICE = "load with load_optimizer_states=False to take the weights alone"


def whole_parameters(
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    groups: Sequence[Sequence[str]],
    aliases: Mapping[str, str],
    *,
    where: str,
) -> Found:
    """Return masters and states, for the parameters as they are in this run's optimizer;
    none without its groups.

    Names are in no file: this run's groups have to be those of the run that wrote it,
    which shapes are compared for.
    Source: DeepSpeed 0.19.8 runtime/fp16/fused_optimizer.py and unfused_optimizer.py, `state_dict`
    Errors: CheckpointError if the groups are others
    """
    if not groups:
        return {}
    base = optimizer.get("optimizer_state_dict", optimizer)
    members = [[aliases.get(name, name) for name in group] for group in groups]
    shapes = {
        name: tuple(value.shape) for name, value in model["module"].items() if isinstance(value, Tensor)
    }
    unknown = next((name for group in members for name in group if name not in shapes), None)
    if unknown is not None:
        raise CheckpointError(f"{where} has no parameter '{unknown}', which this run trains; {_ADVICE}")
    if "fp32_groups_flat" in optimizer:
        return _flat_groups(optimizer["fp32_groups_flat"], base, members, shapes, where)
    return _numbered(optimizer.get("fp32_groups"), base, members, shapes, where)


def _numbered(
    masters: Sequence[Sequence[Tensor]] | None,
    base: Mapping[str, Any],
    members: Sequence[Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
) -> Found:
    theirs = [group["params"] for group in base["param_groups"]]
    if [len(group) for group in theirs] != [len(group) for group in members]:
        raise CheckpointError(
            f"{where}: groups of the optimizer have {[len(group) for group in theirs]} parameters, this "
            f"run's {[len(group) for group in members]}; {_ADVICE}"
        )
    parameters: Found = {}
    for group, names in enumerate(members):
        for index, name in enumerate(names):
            own = _states(base["state"].get(theirs[group][index], {}))
            if masters is not None:
                own[MASTER] = masters[group][index]
            other = next((kind for kind, value in own.items() if tuple(value.shape) != shapes[name]), None)
            if other is not None:
                raise CheckpointError(
                    f"{where}: parameter {index} of the optimizer's group {group} has a state '{other}' of "
                    f"shape {tuple(own[other].shape)}, and in this run it is '{name}' of shape "
                    f"{shapes[name]}; {_ADVICE}"
                )
            parameters[name] = {kind: whole_tensor(value) for kind, value in own.items()}
    return parameters


def _flat_groups(
    masters: Sequence[Tensor],
    base: Mapping[str, Any],
    members: Sequence[Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
) -> Found:
    wanted = [sum(prod(shapes[name]) for name in names) for names in members]
    has = [flat.numel() for flat in masters]
    if wanted != has:
        raise CheckpointError(
            f"{where}: groups of the optimizer have {has} elements, this run's {wanted}; {_ADVICE}"
        )
    numbers = [number for group in base["param_groups"] for number in group["params"]]
    parameters: Found = {}
    for group, names in enumerate(members):
        own = _states(base["state"].get(numbers[group], {}))
        for name, start in _offsets(names, shapes):
            stop = start + prod(shapes[name])
            parameters[name] = {
                kind: _part(flat, start, stop, shapes[name])
                for kind, flat in {**own, MASTER: masters[group]}.items()
            }
    return parameters


def _part(flat: Tensor, start: int, stop: int, shape: tuple[int, ...]) -> TensorPieces:
    return whole_tensor(flat.detach().view(-1)[start:stop], shape)


def _offsets(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    at = 0
    for name in names:
        yield name, at
        at += prod(shapes[name])


def _states(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the states with a number for each element."""
    return {kind: value for kind, value in values.items() if isinstance(value, Tensor) and kind != "step"}
