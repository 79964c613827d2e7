"""The units of a model, made of its parameters in the order of their plans."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...mesh.domain import Domain, Domains
from ...offload.offload import Offload
from ...placement.precision import Precision
from ...placement.stage_policy import Policy, UnitSizes, keep_small_whole
from ..parameters.packed import PackedOf, aliases_of, is_bits, lies_in_unit, parts_of
from ..parameters.sub_buffer_plan import NO_GROUP, Member, plan_sub_buffer
from ..parameters.wrapped import is_wrapped
from .partition import UnitPlan
from .sub_buffer import SubBuffer
from .unit import Unit


def make_units(
    plans: Sequence[UnitPlan],
    members: Sequence[Sequence[Member]],
    *,
    policy: Policy,
    sizes: UnitSizes,
    precision: Precision,
    device: torch.device,
    domains: Domains,
    offload: Offload,
) -> tuple[Unit, ...]:
    """Return a unit for each plan, whose `members` move into its sub-buffers."""
    runs = [_by_role(run, precision, domains) for run in members]
    numels = [[member.param.numel() for member in run] for by_role in runs for run in by_role.values()]
    policies = iter(keep_small_whole(policy, numels, sizes))

    def make(run: Sequence[Member], unit: str, dtype: torch.dtype, domain: Domain) -> SubBuffer:
        plan = plan_sub_buffer(
            run,
            label=domain.label(unit),
            dtype=dtype,
            device=device,
            mesh=domain.comm.mesh,
            policy=next(policies),
            precision=precision,
            offload=offload,
        )
        return SubBuffer(plan, domain=domain, offload=offload)

    return tuple(
        Unit(
            plan.name,
            [make(run, plan.name, dtype, domain) for (dtype, _, domain, _), run in by_role.items()],
            plan.modules,
        )
        for plan, by_role in zip(plans, runs, strict=True)
    )


def members_of(
    plan: UnitPlan, group_of: dict[int, int], packed: PackedOf, *, groups_apart: frozenset[int]
) -> tuple[Member, ...]:
    """Return the parameters of a unit that lie in flat buffers, with the number of the optimizer's group of
    each; behind a packed one its parts, which a wrapped one consists of. See `Rule.groups_apart`.
    """
    members: list[Member] = []
    for name, param in plan.params:
        if not lies_in_unit(param):
            continue
        if not is_wrapped(param):
            members.append(
                Member(
                    name=name,
                    param=param,
                    group=group_of.get(id(param), NO_GROUP),
                    is_apart=group_of.get(id(param), NO_GROUP) in groups_apart,
                    keeps_dtype=id(param) in packed or is_bits(param.dtype),
                    aliases=aliases_of(packed, param),
                )
            )
        for part_name, part in parts_of(packed, param):
            members.append(Member(name=part_name, param=part, group=NO_GROUP, keeps_dtype=True))
    return tuple(members)


def _by_role(
    members: Sequence[Member], precision: Precision, domains: Domains
) -> dict[tuple[torch.dtype, bool, Domain, bool], list[Member]]:
    """Return the members of each sub-buffer of a unit: by dtype, by whether they are trained, by who shares
    them, and by whether their optimizer's group lies apart.
    """
    by_role: dict[tuple[torch.dtype, bool, Domain, bool], list[Member]] = {}
    for member in members:
        dtype = member.param.dtype if member.keeps_dtype else precision.parameters or member.param.dtype
        role = (dtype, member.is_trained, domains.of(member.param), member.is_trained and member.is_apart)
        by_role.setdefault(role, []).append(member)
    return by_role
