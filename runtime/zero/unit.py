"""A unit: the parameters that are gathered, reduced and stepped together, in flat buffers.

One buffer per dtype and role
-----------------------------
A flat buffer has one dtype, and only trained parameters need gradients and optimizer states. So a unit holds one
`SubBuffer` per (dtype, is_trained). The model's parameters keep their identity, name, shape and leaf-ness: `p.data`
becomes a view of the flat parameters once; what becomes of `p.grad` is the matter of gradients.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Collectives, Pending
from ..errors import ConfigError
from .buffer import FlatBuffer
from .gradients import Gradients, make_gradients
from .home import early_of
from .layout import Segment, plan_layout
from .placeholder import Placeholder
from .policy import Placement, Policy
from .precision import Precision

NO_GROUP = -1  # a parameter that no optimizer group contains


class UnitState(Enum):
    """Where a unit's parameters are, and what that costs this rank. n = the unit's elements, N = ranks per shard axis."""

    FREED = "freed"  # n/N elements: the shard; each parameter is a placeholder of its true shape
    GATHERING = "gathering"  # n/N + n elements: allocated and being filled; not to be read yet
    LIVE = "live"  # n/N + n elements: every parameter can be used; n where nothing is sharded


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A parameter, its full name and the optimizer group that trains it (NO_GROUP: none)."""

    name: str
    param: nn.Parameter
    group: int

    @property
    def is_trained(self) -> bool:
        return self.param.requires_grad and self.group != NO_GROUP


class SubBuffer:
    """The parameters of one unit that share a dtype and a role, and this rank's shard of them.

    Order: construction broadcasts from rank 0, so every rank must build the same ones in the same order
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        unit: str,
        dtype: torch.dtype,
        device: torch.device,
        comm: Collectives,
        policy: Policy,
        precision: Precision,
    ) -> None:
        self.members = tuple(members)
        self.label = f"unit '{unit}'"
        self.is_trained = members[0].is_trained
        self._comm = comm
        mesh = comm.mesh
        self.is_sharded = policy.parameters is Placement.SHARDED and not mesh.shard.is_alone
        self.layout = plan_layout(
            [tuple(member.param.shape) for member in members],
            groups=[member.group for member in members],
            num_shards=mesh.world.size,
            itemsize=min(dtype.itemsize, (precision.sent or dtype).itemsize),
        )
        # of gradients, masters and states; of sharded parameters there may be fewer, and `kept` is one of those
        self.shard_index, self.num_shards = mesh.state_index, mesh.num_states
        self.values = FlatBuffer(self.layout, dtype=dtype, device=device)
        self.param_shard = self.values.shard(self.shard_index, num_shards=self.num_shards)  # [shard]
        # [shard] float32, what the optimizer updates; float32 parameters are their own master
        self.master = self._take_over(comm)
        self._placeholders: tuple[Placeholder, ...] = ()
        self.kept = (
            self.values.flat
        )  # what this rank holds of the parameters between their uses; param_shard is a part of it
        if self.is_sharded:
            self._keep_shard_only()
        self.states: dict[str, Tensor] = {}  # [shard] float32 by name: the optimizer's
        # place -> states by name, of members that the optimizer sees whole; empty on ranks that do not own the member
        self.states_of_whole: dict[int, Callable[[], dict[str, Any]]] = {}
        self._gradients: Gradients | None = None
        if self.is_trained:
            self._gradients = make_gradients(
                policy.gradients,
                [member.name for member in members],
                [member.param for member in members],
                self.layout,
                dtype=dtype,
                precision=precision,
                device=device,
                index=self.shard_index,
                num_shards=self.num_shards,
                is_alone=mesh.world.is_alone,
            )

    @property
    def gradients(self) -> Gradients:
        """The gradients of trained parameters."""
        if self._gradients is None:
            raise AssertionError(f"{self.members[0].name} is frozen and has no gradients")
        return self._gradients

    def grad_chunk(self, index: int, *, num_chunks: int) -> Iterator[Tensor]:
        """Return a part of this rank's shard of the reduced gradients, in pieces: chunk `index` of the whole buffer's."""
        start, stop = self.layout.shard_range(index, num_shards=num_chunks)
        own_start, _ = self.layout.shard_range(self.shard_index, num_shards=self.num_shards)
        return (piece for _, piece in self.gradients.pieces(start - own_start, stop - own_start))

    @property
    def has_separate_master(self) -> bool:
        """Whether the optimizer updates a float32 copy that must be rounded into the parameters."""
        return self.is_trained and self.values.flat.dtype != torch.float32

    def segments(self) -> tuple[Segment, ...]:
        """Return this rank's runs of equal optimizer group."""
        return self.layout.segments(self.shard_index, num_shards=self.num_shards)

    def adopt_gradients(self) -> None:
        """Take over what the user did to `p.grad`; see `Gradients.adopt`.

        Errors: ConfigError if a parameter no longer lies in the flat buffer
        """
        if self.is_sharded:  # whoever converts or moves a freed parameter is told so at once
            self.gradients.adopt()
            return
        for member, value in zip(self.members, self.values.views, strict=True):
            param = member.param
            if param.data_ptr() != value.data_ptr() or param.dtype != value.dtype:
                raise ConfigError(
                    f"parameter '{member.name}' is {param.dtype} on {param.device} in memory of its own: initialize() "
                    f"had placed it in a flat {value.dtype} buffer on {value.device}; convert or move the model before "
                    "initialize(), and later change a parameter's values only in place"
                )
        self.gradients.adopt()

    # What follows, up to `refresh_master`, is for parameters that are not always here: sharded or offloaded.

    def start_gather(self) -> Pending:
        """Begin to bring all values here; `show` when that is done.

        Errors: ConfigError while this rank's shard is offloaded
        """
        if self.is_offloaded:
            raise ConfigError(
                f"parameter '{self.members[0].name}' is needed, but engine.offload_states() has moved this rank's shard to "
                "host memory; call engine.reload_states() first"
            )
        self.values.allocate()
        return self._comm.gather_from(self.kept, self.values.flat, what=self.label)

    @torch.no_grad()
    def show(self) -> None:
        """Let the parameters have their values.

        Errors: ConfigError if somebody has written to one meanwhile
        """
        for placeholder, view in zip(self._placeholders, self.values.views, strict=True):
            placeholder.take_away(view)

    @torch.no_grad()
    def cover(self) -> None:
        """Let the parameters be placeholders."""
        self._placeholders = self._placeholders or tuple(
            Placeholder(member.name, member.param, dtype=view.dtype, device=view.device)
            for member, view in zip(self.members, self.values.views, strict=True)
        )
        for placeholder in self._placeholders:
            placeholder.put()

    def hide(self) -> bool:
        """Let the parameters be placeholders, and give the memory back; return whether it could be."""
        self.cover()
        return self.values.free_unless_referred_to()

    @property
    def is_offloaded(self) -> bool:
        """Whether the memory of what this rank holds of the values was given up."""
        return self.layout.numel > 0 and self.param_shard.untyped_storage().nbytes() == 0

    @property
    def is_edited(self) -> bool:
        """Whether the values that are here differ from this rank's shard of them."""
        return not torch.equal(self._own_values(), self.kept)

    @torch.no_grad()
    def take_edits(self) -> None:
        """Take into this rank's shard, and into the master, what was written to the parameters while they were here."""
        if self.is_sharded:
            self.kept.copy_(self._own_values())
        self.refresh_master()

    def load(self, place: int, whole: Tensor) -> None:
        """Set the member at `place` to values of its shape, wherever they lie."""
        if not self.is_sharded:
            self.members[place].param.copy_(whole)
            return
        self._copy_fragment(place, whole, self.kept, self._comm.mesh.shard.index, self._comm.mesh.shard.size)

    def copy_fragment(self, place: int, whole: Tensor, shard: Tensor) -> None:
        """Copy what this rank's shard holds of a value of the member at `place` into `shard`, [shard] of any dtype."""
        self._copy_fragment(place, whole, shard, self.shard_index, self.num_shards)

    def _copy_fragment(self, place: int, whole: Tensor, shard: Tensor, index: int, num_shards: int) -> None:
        fragment = self.layout.fragment(self.layout.slots[place], index, num_shards=num_shards)
        if fragment is not None:
            source = whole.reshape(-1)[fragment.offset_in_param : fragment.offset_in_param + fragment.numel]
            shard[fragment.offset_in_shard : fragment.offset_in_shard + fragment.numel].copy_(source)

    def refresh_master(self) -> None:
        """Take the parameters' values into the master, if it is a copy."""
        if self.has_separate_master:
            self.master.copy_(self.param_shard)

    def release(self) -> None:
        """Free gradients and master; the parameters stay where they are."""
        self.gradients.release()
        self._gradients, self.is_trained = None, False
        self.states, self.states_of_whole = {}, {}
        self.master = self.param_shard

    def _take_over(self, comm: Collectives) -> Tensor:
        """Copy the parameters into the flat buffer, rank 0's everywhere, and make them views of it.

        The master starts from the values before they are rounded to 16 bits.
        """
        whole = self.values
        if self.has_separate_master:
            whole = FlatBuffer(self.layout, dtype=torch.float32, device=self.values.flat.device)
        for member, view, own in zip(self.members, whole.views, self.values.views, strict=True):
            early = early_of(member.param)
            if early is not None:  # one at a time, so a model made in zero.Init is never whole
                early.take_out()
            view.copy_(member.param.detach())
            member.param.data = own
            member.param.grad = None
        comm.broadcast(whole.flat, what=self.label)
        if whole is not self.values:
            self.values.flat.copy_(whole.flat)
        shard = whole.shard(self.shard_index, num_shards=self.num_shards)
        return shard.clone() if self.has_separate_master else shard

    def _keep_shard_only(self) -> None:
        self.kept = self._own_values().clone()
        start, _ = self.layout.shard_range(self.shard_index, num_shards=self.num_shards)
        kept_start, _ = self.layout.shard_range(
            self._comm.mesh.shard.index, num_shards=self._comm.mesh.shard.size
        )
        self.param_shard = self.kept[start - kept_start :][: self.param_shard.numel()]
        if not self.has_separate_master:
            self.master = self.param_shard
        self.hide()

    def _own_values(self) -> Tensor:
        """Return this rank's shard of the parameters, while they are here."""
        axis = self._comm.mesh.shard
        return self.values.shard(axis.index, num_shards=axis.size)


class Unit:
    """Parameters that move together, and their state. `modules` are those whose forward uses them."""

    def __init__(self, name: str, parts: Sequence[SubBuffer], modules: Sequence[nn.Module]) -> None:
        self.name = name
        self.parts = tuple(parts)
        self.modules = tuple(modules)
        self._sharded = tuple(part for part in parts if part.is_sharded)
        self.state = UnitState.FREED if self._sharded else UnitState.LIVE
        self._gathers: list[Pending] = []
        self._referred_to: list[
            SubBuffer
        ] = []  # freed, but for the memory, in which somebody else has tensors
        self.num_gathers = 0

    @property
    def is_sharded(self) -> bool:
        """Whether any of it is; so there is something to gather."""
        return bool(self._sharded)

    def start_gather(self) -> None:
        """Begin to bring the values here, unless they are or that has been begun.

        Order: a collective
        """
        if self.state is UnitState.FREED:
            self._gathers = [part.start_gather() for part in self._sharded]
            self.state = UnitState.GATHERING
            self.num_gathers += 1

    def make_live(self) -> None:
        """Bring the values here and wait until they are.

        Order:  a collective
        Errors: ConfigError if somebody has written to a freed parameter
        """
        self.start_gather()
        if self.state is UnitState.GATHERING:
            self._finish_gathers()
            self.state = UnitState.LIVE
            for part in self._sharded:
                part.show()

    def free(self) -> None:
        """Keep this rank's shards only; nothing happens where nothing is sharded."""
        if self.state is UnitState.FREED:
            self._referred_to = [
                part for part in self._referred_to if not part.values.free_unless_referred_to()
            ]
        if not self._sharded or self.state is UnitState.FREED:
            return
        self._finish_gathers()
        self._referred_to = []
        for part in self._sharded:
            if self.state is UnitState.GATHERING:  # for nothing
                part.values.free()
            elif not part.hide():
                self._referred_to.append(part)
        self.state = UnitState.FREED

    @property
    def is_referred_to(self) -> bool:
        """Whether it is freed but for memory in which somebody else has tensors."""
        return self.state is UnitState.FREED and bool(self._referred_to)

    def _finish_gathers(self) -> None:
        for gather in self._gathers:
            gather.wait()
        self._gathers = []
