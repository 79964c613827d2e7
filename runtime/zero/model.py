"""A model as units: the collectives over all of them, in an order that is the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

import torch
from torch import nn

from ..comm.collectives import Collectives, Pending
from ..errors import ConfigError
from .partition import UnitPlan, cut_into_units
from .policy import Placement, Policy
from .reducer import make_reducer
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
        device: torch.device,
        comm: Collectives,
    ) -> None:
        """Cut `module` into units; `param_dtype` None keeps each parameter's dtype; `groups` are the optimizer's.

        Errors: ConfigError if the ranks hold different models, or a trained parameter has a dtype we cannot train
        """
        if policy.parameters is Placement.SHARDED:
            raise AssertionError(f"{policy} is not built yet; the config reader lets no such stage through")
        self.policy = policy
        self.comm = comm
        plans = cut_into_units(module, max_numel=max_unit_numel)
        group_of = {id(param): index for index, group in enumerate(groups) for param in group}
        members = [_members(plan, group_of) for plan in plans]
        _check_trained_dtypes(members, param_dtype)
        _check_agreement(members, comm)
        self.units = tuple(
            Unit(plan.name, _parts(run, param_dtype=param_dtype, device=device, comm=comm, policy=policy))
            for plan, run in zip(plans, members, strict=True)
        )
        _place_rest(module, device=device, comm=comm)
        self.trained = tuple(part for unit in self.units for part in unit.parts if part.is_trained)
        self._reducer = make_reducer(self.trained, comm)

    def begin_backward(self) -> None:
        """Make everything ready for gradients.

        Errors: ConfigError if the user did something to `p.grad` that has no meaning
        """
        self._adopt_gradients()
        self._reducer.begin_backward()

    def end_backward(self) -> None:
        """Autograd has come to its end."""
        self._reducer.end_backward()

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
        self._reducer.release()
        for part in self.trained:
            part.release()
        self.trained = ()

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
        SubBuffer(run, dtype=dtype, device=device, comm=comm, gradients=policy.gradients)
        for (dtype, _), run in by_role.items()
    ]


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
