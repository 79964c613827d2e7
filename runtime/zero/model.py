"""A model as units: the collectives over all of them, in an order that is the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

import torch
from torch import nn

from ..comm.collectives import Collectives, Pending
from ..errors import ConfigError
from . import ds_attributes
from .access import Access
from .home import move_in
from .partition import IsLeaf, UnitPlan, cut_into_units
from .policy import Placement, Policy
from .reducer import make_reducer
from .residents import Residents
from .unit import NO_GROUP, Member, SubBuffer, Unit

TRAINED_DTYPES = (torch.float32, torch.bfloat16)


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
        is_leaf: IsLeaf,
        device: torch.device,
        comm: Collectives,
    ) -> None:
        """Cut `module` into units; `param_dtype` None keeps each parameter's dtype; `groups` are the optimizer's.

        Errors: ConfigError if the ranks hold different models, or a trained parameter has a dtype we cannot train
        """
        self.policy = policy
        self.comm = comm
        plans = cut_into_units(module, max_numel=max_unit_numel, is_leaf=is_leaf)
        group_of = {id(param): index for index, group in enumerate(groups) for param in group}
        members = [_members(plan, group_of) for plan in plans]
        _check_trained_dtypes(members, param_dtype)
        _check_agreement(members, comm)
        self.units = tuple(
            Unit(
                plan.name,
                _parts(run, param_dtype=param_dtype, device=device, comm=comm, policy=policy),
                plan.modules,
            )
            for plan, run in zip(plans, members, strict=True)
        )
        self._residents = Residents(self.units)
        is_sharded = any(part.is_sharded for unit in self.units for part in unit.parts)
        self._access = Access(module, self.units, self._residents, keeps=self) if is_sharded else None
        _place_rest(module, device=device, comm=comm)
        self.trained = tuple(part for unit in self.units for part in unit.parts if part.is_trained)
        self._reducer = make_reducer(self.trained, comm)
        move_in(self)
        self._describe()

    def begin_backward(self) -> None:
        """Make everything ready for gradients.

        Errors: ConfigError if the user did something to `p.grad` that has no meaning
        """
        self._adopt_gradients()
        self._residents.begin_backward()
        self._reducer.begin_backward()

    def end_backward(self) -> None:
        """Autograd has come to its end."""
        self._residents.end_backward()
        self._reducer.end_backward()

    def end_step(self) -> None:
        """The gradients have been used: set them to zero, and keep of sharded parameters nothing but the shards."""
        self._residents.end_step()
        self.zero_gradients()

    def zero_gradients(self) -> None:
        """Set all gradients to zero."""
        self._reducer.forget()
        for part in self.trained:
            part.gradients.zero()
        for unit in self.units:
            for part in unit.parts:
                if not part.is_trained:
                    for member in part.members:
                        member.param.grad = None

    def finish_gradients(self) -> None:
        """Each rank's shard of the gradients is the average over all ranks afterwards.

        Errors: as begin_backward
        """
        self._adopt_gradients()
        self._reducer.finish()

    def publish(self, part: SubBuffer) -> Pending:
        """Begin to give every rank the parameters that the others' optimizers have updated, where all hold all."""
        return Pending.done() if part.is_sharded else self.comm.gather(part.values.flat)

    @contextmanager
    def gathered(self, units: Sequence[Unit] | None = None) -> Iterator[None]:
        """Have the parameters of these units, default all, here.

        Order: a collective
        """
        with self._residents.held(self.units if units is None else units):
            yield

    def take_edits(self) -> None:
        """Take over, in shards and float32 masters, what was written to parameters from outside."""
        for unit in self.units:
            for part in unit.parts:
                part.take_edits()

    def lend(self, unit: Unit) -> None:
        """Have this unit here until the forward that is under way ends."""
        self._residents.lend(unit)

    def release(self) -> None:
        """Free gradients and masters; every rank has all parameters from then on.

        Order: a collective where parameters are sharded
        """
        if self._access is not None:
            self._access.release()
            self._residents.hold_all()
        for member in (member for unit in self.units for part in unit.parts for member in part.members):
            ds_attributes.detach(member.param)
        self._reducer.release()
        for part in self.trained:
            part.release()
        self.trained = ()

    def _describe(self) -> None:
        if self.policy.parameters is not Placement.SHARDED:
            return
        axis = self.comm.mesh.shard
        for part in (part for unit in self.units for part in unit.parts):
            for member, slot in zip(part.members, part.layout.slots, strict=True):
                own = part.layout.fragment(slot, axis.index, num_shards=axis.size)
                start, numel = (own.offset_in_shard, own.numel) if own else (0, 0)
                shard = part.param_shard[start : start + numel]
                ds_attributes.attach(member.param, shard=shard, is_sharded=part.is_sharded, group=axis.group)

    def _adopt_gradients(self) -> None:
        for part in self.trained:
            part.adopt_gradients()


def _members(plan: UnitPlan, group_of: dict[int, int]) -> tuple[Member, ...]:
    return tuple(
        Member(name=name, param=param, group=group_of.get(id(param), NO_GROUP))
        for name, param in plan.params
        if param.is_floating_point()
    )


def _parts(
    members: Sequence[Member],
    *,
    param_dtype: torch.dtype | None,
    device: torch.device,
    comm: Collectives,
    policy: Policy,
) -> list[SubBuffer]:
    by_role: dict[tuple[torch.dtype, bool], list[Member]] = {}
    for member in members:
        by_role.setdefault((param_dtype or member.param.dtype, member.is_trained), []).append(member)
    return [
        SubBuffer(run, dtype=dtype, device=device, comm=comm, policy=policy)
        for (dtype, _), run in by_role.items()
    ]


def _check_trained_dtypes(units: Iterable[Sequence[Member]], param_dtype: torch.dtype | None) -> None:
    for member in (member for members in units for member in members if member.is_trained):
        dtype = param_dtype or member.param.dtype
        if dtype not in TRAINED_DTYPES and dtype != param_dtype:
            raise ConfigError(
                f"parameter '{member.name}' is {dtype}; trained parameters are float32 or bfloat16: convert the model "
                "before initialize(), or set bf16.enabled or fp16.enabled"
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
