"""Fixed facts of a sub-buffer: its parameters, and where their values lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ...comm.mesh import Mesh
from ...offload.offload import Offload, SubBufferResidence
from ...optimizers.eight_bits import BLOCK_NUMEL, CODES
from ...placement.precision import Precision
from ...placement.stage_policy import Placement, Policy
from .layout import FlatLayout, plan_layout

NO_GROUP = -1  # a parameter that no optimizer group contains


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A parameter, its full name and the optimizer group that trains it (NO_GROUP: none)."""

    name: str
    param: nn.Parameter
    group: int
    is_apart: bool = False  # its group's parameters lie in sub-buffers of their own
    keeps_dtype: bool = False  # bits that no precision converts
    aliases: tuple[nn.Parameter, ...] = ()  # other names of its values, see packed.py

    @property
    def is_trained(self) -> bool:
        return self.param.requires_grad and self.group != NO_GROUP


@dataclass(frozen=True, kw_only=True)
class SubBufferPlan:
    """A flat buffer has one dtype, and only trained parameters need gradients and optimizer states."""

    label: str  # name in messages
    members: tuple[Member, ...]
    layout: FlatLayout
    dtype: torch.dtype
    device: torch.device
    is_trained: bool  # as it was when the model was cut
    residence: SubBufferResidence
    mesh: Mesh  # the ranks that share it, and this rank's place among them
    policy: Policy
    precision: Precision

    @cached_property
    def params(self) -> tuple[nn.Parameter, ...]:
        return tuple(member.param for member in self.members)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @cached_property
    def is_sharded(self) -> bool:
        """Whether the parameters are elsewhere between their uses.

        Those that are offloaded come and go as those in shards do, with one rank too.
        """
        stays = self.mesh.shard.is_alone and not self.residence.parameters.is_away
        return self.policy.parameters is Placement.SHARDED and not stays

    @property
    def shard_index(self) -> int:
        """Index of this rank's shard of gradients, masters and states; of sharded parameters
        there may be fewer.
        """
        return self.mesh.state_index

    @property
    def num_shards(self) -> int:
        return self.mesh.num_states

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of the values that the optimizer updates: float32, or that of the parameters."""
        return self.dtype if self.dtype == self.precision.masters else torch.float32

    @property
    def has_separate_master(self) -> bool:
        """Whether the optimizer updates a copy that must be rounded into the parameters,
        or brought to them.
        """
        return self.is_trained and (self.dtype != self.master_dtype or self.residence.is_apart)

    @property
    def is_rounded_by_random_bits(self) -> bool:
        """Whether a step rounds values that it keeps."""
        return self.precision.states != torch.float32 or self.master_dtype != torch.float32

    def own_run(self, index: int, *, num_chunks: int) -> tuple[int, int]:
        """Return where chunk `index` of the whole buffer begins and ends in this rank's shard."""
        start, stop = self.layout.shard_range(index, num_shards=num_chunks)
        own_start, _ = self.layout.shard_range(self.shard_index, num_shards=self.num_shards)
        return start - own_start, stop - own_start

    def copy_fragment(
        self, index: int, whole: Tensor, shard: Tensor, shard_index: int, *, num_shards: int
    ) -> None:
        """Copy what shard `shard_index` of so many holds of a value of the member at `index` into
        `shard`, 1-D of any dtype.
        """
        fragment = self.layout.fragment(self.layout.slots[index], shard_index, num_shards=num_shards)
        if fragment is not None:
            source = whole.reshape(-1)[fragment.offset_in_param : fragment.offset_in_param + fragment.numel]
            shard[fragment.offset_in_shard : fragment.offset_in_shard + fragment.numel].copy_(source)


def plan_sub_buffer(
    members: Sequence[Member],
    *,
    label: str,
    dtype: torch.dtype,
    device: torch.device,
    mesh: Mesh,
    policy: Policy,
    precision: Precision,
    offload: Offload,
) -> SubBufferPlan:
    """Return the plan of these parameters of a unit.

    Order: `offload` is asked for sub-buffer after sub-buffer, in the same order on every rank
    """
    is_trained = members[0].is_trained
    return SubBufferPlan(
        label=label,
        members=tuple(members),
        layout=plan_layout(
            [tuple(member.param.shape) for member in members],
            groups=[member.group for member in members],
            num_shards=mesh.sharers.size,
            itemsize=min(dtype.itemsize, (precision.sent or dtype).itemsize),
            block_numel=BLOCK_NUMEL if is_trained and precision.states == CODES else 1,
        ),
        dtype=dtype,
        device=device,
        is_trained=is_trained,
        residence=offload.residence_of(
            sum(member.param.numel() for member in members), is_trained=is_trained
        ),
        mesh=mesh.places,
        policy=policy,
        precision=precision,
    )
