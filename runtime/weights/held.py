"""The weights that this rank holds, or parts of them, before they have other names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..checkpoint.export.output_plan import Spec
from ..mesh.domain import Domain, Domains
from ..strided import is_strided
from ..zero.model.sharded_model import ShardedModel
from ..zero.parameters.wrapped import unwrapped
from ..zero.units.sub_buffer import SubBuffer


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """A parameter that lies in a sub-buffer, or a tensor that lies in none."""

    names: tuple[str, ...]  # in the whole model; several where other ranks use one name for theirs
    spec: Spec  # what each of them has when it is whole
    sub_buffer: SubBuffer | None = None
    index: int = 0
    beside: Tensor | None = None

    @property
    def sources(self) -> dict[str, Spec]:
        """Shape and dtype by name."""
        return dict.fromkeys(self.names, self.spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeights:
    """All weights of this rank by group: what is gathered together."""

    groups: tuple[tuple[HeldTensor, ...], ...]
    aliases: dict[str, str]  # another name of a tied tensor -> its first name
    no_tensors: tuple[str, ...]  # names in the state_dict of what is no dense tensor


def held_weights(
    module: nn.Module,
    model: ShardedModel,
    domains: Domains,
    *,
    left_out: Collection[str],
    joins_dtypes: bool = False,
) -> HeldWeights:
    """Return all but those whose names are in `left_out`, in the order of the units: parameters, and buffers
    that lie in the unit's modules. `joins_dtypes`: a group is what one unit has of all dtypes.
    """
    groups: dict[_Key, list[HeldTensor]] = {}

    def key_of(place: int, dtype: torch.dtype, domain: Domain) -> _Key:
        return _key(place, None if joins_dtypes else dtype, domain, domains)

    first_name: dict[int, str] = {}
    for place, unit in enumerate(model.units):
        for sub_buffer in unit.sub_buffers:
            key = key_of(place, sub_buffer.plan.dtype, sub_buffer.domain)
            for index, member in enumerate(sub_buffer.members):
                first_name[id(member.param)] = sub_buffer.true_name(index)
                if member.name not in left_out:
                    spec = Spec(sub_buffer.whole_shape(index), sub_buffer.plan.dtype)
                    held = HeldTensor(sub_buffer.true_names(index), spec, sub_buffer, index)
                    groups.setdefault(key, []).append(held)
    unit_of = _units_of_others(model)
    aliases: dict[str, str] = {}
    no_tensors: list[str] = []
    order: dict[str, int] = {}
    # keep_vars, because detaching a parameter asks for its values, which may be sharded
    for name, value in unwrapped(module.state_dict(keep_vars=True).items()).items():
        if name in left_out:
            continue
        if not is_strided(value):
            no_tensors.append(name)
            continue
        first = first_name.setdefault(id(value), name)
        order.setdefault(first, len(order))
        if first != name:
            aliases[name] = first
        elif id(value) in unit_of or not isinstance(value, nn.Parameter):
            key = key_of(unit_of.get(id(value), len(model.units)), value.dtype, domains.of(value))
            beside = HeldTensor((name,), Spec(tuple(value.shape), value.dtype), beside=value.detach())
            groups.setdefault(key, []).append(beside)
    return HeldWeights(
        groups=tuple(
            tuple(sorted(groups[key], key=lambda one: order.get(one.names[0], len(order))))
            for key in sorted(groups, key=lambda key: key.place)
        ),
        aliases=aliases,
        no_tensors=tuple(no_tensors),
    )


def names_of(group: Sequence[HeldTensor]) -> tuple[str, ...]:
    """Return the names of all tensors of a group."""
    return tuple(name for one in group for name in one.names)


class _Key(NamedTuple):
    place: int  # number of the unit
    dtype: torch.dtype | None
    between_stages: Domain | None


def _key(place: int, dtype: torch.dtype | None, domain: Domain, domains: Domains) -> _Key:
    """Return the key of a group. Weights that stages share come first, since units differ."""
    line = next(line for line in domain.sharers if domains.job.index in line)
    if set(line) <= set(domains.holder_ranks):
        return _Key(place, dtype, None)
    return _Key(-1, dtype, domain)


def _units_of_others(model: ShardedModel) -> dict[int, int]:
    """Return the unit in whose modules each tensor lies that is in no sub-buffer, by its id."""
    held = {id(param) for unit in model.units for one in unit.sub_buffers for param in one.plan.params}
    found: dict[int, int] = {}
    for place, unit in enumerate(model.units):
        for module in unit.modules:
            for tensor in (*module.buffers(), *module.parameters()):
                if id(tensor) not in held:
                    found.setdefault(id(tensor), place)
    return found
