"""A model as units: the collectives over all of them, in an order that is the same on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from zlib import crc32

import torch
from torch import nn

from ..comm.collectives import Collectives, Pending
from ..errors import ConfigError
from .partition import UnitPlan, cut_into_units
from .policy import Placement, Policy, ReduceAt
from .unit import NO_GROUP, Member, SubBuffer, Unit

TRAINED_DTYPES = (torch.float32, torch.bfloat16)
_IN_FLIGHT = 2  # collectives under way at once: one on the wire while the other is added up


class ShardedModel:
    """The units of a module, built in place.

    Order: every rank must construct it and call its methods in the same order; units go in definition order, which
           does not depend on what a rank's data made the model compute
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        policy: Policy,
        groups: Sequence[Sequence[torch.Tensor]],
        param_dtype: torch.dtype | None,
        max_unit_numel: int,
        device: torch.device,
        comm: Collectives,
    ) -> None:
        """Cut `module` into units; `param_dtype` None keeps each parameter's dtype; `groups` are the optimizer's.

        Errors: ConfigError if the ranks hold different models, or a trained parameter has a dtype we cannot train
        """
        if (
            Placement.SHARDED in (policy.parameters, policy.gradients)
            or policy.reduce_at is not ReduceAt.BOUNDARY
        ):
            raise AssertionError(f"{policy} is not built yet; the config reader lets no such stage through")
        self.policy = policy
        self.comm = comm
        plans = cut_into_units(module, max_numel=max_unit_numel)
        group_of = {id(param): index for index, group in enumerate(groups) for param in group}
        members = [_members(plan, group_of) for plan in plans]
        _check_trained_dtypes(members, param_dtype)
        _check_agreement(members, comm)
        self.units = tuple(
            Unit(plan.name, _parts(run, param_dtype=param_dtype, device=device, comm=comm))
            for plan, run in zip(plans, members, strict=True)
        )
        _place_rest(module, device=device, comm=comm)
        self.trained = tuple(part for unit in self.units for part in unit.parts if part.is_trained)

    def rebind_gradients(self) -> None:
        """Take over what the user did to `p.grad` since the last call; see `SubBuffer.rebind_gradients`."""
        for part in self.trained:
            part.rebind_gradients()

    def zero_gradients(self) -> None:
        """Set all gradients to zero."""
        for part in self.trained:
            part.zero_gradients()
        for unit in self.units:
            for part in unit.parts:
                if not part.is_trained:
                    for member in part.members:
                        member.param.grad = None

    def reduce_gradients(self) -> None:
        """Average the gradients over all ranks; each rank's shard is meaningful afterwards."""
        self._in_order(self.comm.reduce(part.grads.flat) for part in self.trained)

    def start_gather(self, part: SubBuffer) -> Pending:
        """Begin to give every rank the parameters that the others' optimizers have updated."""
        return self.comm.gather(part.values.flat)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Make the float32 masters follow parameters that were written from outside."""
        for part in self.trained:
            part.refresh_master()

    def release(self) -> None:
        """Free gradients and masters; the parameters stay where they are."""
        for part in self.trained:
            part.release()
        self.trained = ()

    def _in_order(self, collectives: Iterable[Pending]) -> None:
        under_way: deque[Pending] = deque()
        for pending in collectives:
            under_way.append(pending)
            if len(under_way) == _IN_FLIGHT:
                under_way.popleft().wait()
        for pending in under_way:
            pending.wait()


def _members(plan: UnitPlan, group_of: dict[int, int]) -> tuple[Member, ...]:
    return tuple(
        Member(name=name, param=param, group=group_of.get(id(param), NO_GROUP))
        for name, param in plan.params
        if param.is_floating_point()
    )


def _parts(
    members: Sequence[Member], *, param_dtype: torch.dtype | None, device: torch.device, comm: Collectives
) -> list[SubBuffer]:
    by_role: dict[tuple[torch.dtype, bool], list[Member]] = {}
    for member in members:
        by_role.setdefault((param_dtype or member.param.dtype, member.is_trained), []).append(member)
    return [SubBuffer(run, dtype=dtype, device=device, comm=comm) for (dtype, _), run in by_role.items()]


def _check_trained_dtypes(units: Iterable[Sequence[Member]], param_dtype: torch.dtype | None) -> None:
    for member in (member for members in units for member in members if member.is_trained):
        dtype = param_dtype or member.param.dtype
        if dtype not in TRAINED_DTYPES:
            raise ConfigError(
                f"parameter '{member.name}' is {dtype}; trained parameters are float32 or bfloat16: convert the model "
                "before initialize(), or set bf16.enabled"
            )


def _check_agreement(units: Iterable[Sequence[Member]], comm: Collectives) -> None:
    """Ranks with different models would wait for each other for ever, or train nonsense: find out first."""
    text = "\n".join(
        f"{member.name} {tuple(member.param.shape)} {member.param.dtype} {member.is_trained} {member.group}"
        for members in units
        for member in members
    )
    digests = comm.all_gather_objects(crc32(text.encode()))
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ConfigError(
                f"rank {rank} and rank 0 were given different models or optimizer groups: names, shapes, dtypes, "
                "requires_grad and groups of all parameters must agree; build the model the same way on every rank"
            )


def _place_rest(module: nn.Module, *, device: torch.device, comm: Collectives) -> None:
    """Move what no unit holds, buffers and integer parameters, to the device and take rank 0's values."""
    integers = (param for param in module.parameters() if not param.is_floating_point())
    for tensor in (*integers, *module.buffers()):
        whole = tensor.detach().to(device).contiguous()
        comm.broadcast(whole)
        tensor.data = whole
