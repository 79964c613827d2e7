"""DeepSpeed's checkpoints of stage 0: an optimizer that numbers its parameters, or has them flat by group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from .deepspeed_pieces import MASTER, Found, Pieces, whole_tensor

_ADVICE = "load with load_optimizer_states=False to take the weights alone"


def whole_parameters(
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    groups: Sequence[Sequence[str]],
    aliases: Mapping[str, str],
    *,
    where: str,
) -> Found:
    """Return masters and states, for the parameters as they are in this run's optimizer; none without its groups.

    Names are in no file: this run's groups have to be those of the run that wrote it, which shapes are compared for.
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
            f"{where}: groups of the optimizer have {[len(group) for group in theirs]} parameters, this run's "
            f"{[len(group) for group in members]}; {_ADVICE}"
        )
    found: Found = {}
    for group, names in enumerate(members):
        for place, name in enumerate(names):
            own = _states(base["state"].get(theirs[group][place], {}))
            if masters is not None:
                own[MASTER] = masters[group][place]
            other = next((kind for kind, value in own.items() if tuple(value.shape) != shapes[name]), None)
            if other is not None:
                raise CheckpointError(
                    f"{where}: parameter {place} of the optimizer's group {group} has a state '{other}' of shape "
                    f"{tuple(own[other].shape)}, and in this run it is '{name}' of shape {shapes[name]}; {_ADVICE}"
                )
            found[name] = {kind: whole_tensor(value) for kind, value in own.items()}
    return found


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
    found: Found = {}
    for group, names in enumerate(members):
        own = _states(base["state"].get(numbers[group], {}))
        for name, start in _offsets(names, shapes):
            stop = start + prod(shapes[name])
            found[name] = {
                kind: _part(flat, start, stop, shapes[name])
                for kind, flat in {**own, MASTER: masters[group]}.items()
            }
    return found


def _part(flat: Tensor, start: int, stop: int, shape: tuple[int, ...]) -> Pieces:
    return whole_tensor(flat.detach().view(-1)[start:stop], shape)


def _offsets(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    at = 0
    for name in names:
        yield name, at
        at += prod(shapes[name])


def _states(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those with a number for each element."""
    return {kind: value for kind, value in values.items() if isinstance(value, Tensor) and kind != "step"}
