"""A sub-buffer: the parameters of one unit that share a dtype and a role, in one flat buffer.

It has three nouns: the values, with the part that a rank keeps (param_shard.py), masters and optimizer states
(optimizer_shard.py), and gradients (gradients.py). What concerns two of them stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from ...comm.collectives import Collectives
from ...comm.mesh import Mesh
from ...errors import ConfigError
from ...mesh.domain import Domain
from ...offload.offload import Offload, SubBufferResidence
from ...offload.spill import Spill
from ..gradients.gradients import Gradients
from ..gradients.make_gradients import make_gradients
from ..parameters.layout import FlatLayout, Segment
from ..parameters.param_shard import ParamShard
from ..parameters.sub_buffer_plan import Member, SubBufferPlan
from ..parameters.writes import first_difference
from .optimizer_shard import OptimizerShard

T = TypeVar("T")


class SubBuffer:
    """The parameters of one unit that share a dtype and a role, and this rank's shard of them.

    Order: construction broadcasts from rank 0, so every rank must build the same ones in the same order
    """

    def __init__(self, plan: SubBufferPlan, *, domain: Domain, offload: Offload) -> None:
        self.plan, self.domain = plan, domain
        self.param_shard = ParamShard(plan, domain.comm)
        master = self.param_shard.take_over()
        self.param_shard.settle(offload)
        self.optimizer_shard = OptimizerShard(plan, self.param_shard, master, offload)
        self._all_segments = plan.layout.segments(plan.shard_index, num_shards=plan.num_shards)
        self.start_out()
        self.finish_out()
        self.refuses_writes: str | None = None  # the ds_config's key that makes writes impossible
        # called before master or states are used outside a step; the argument: they will be written
        self.before_use: Callable[[bool], None] | None = None
        self._gradients = make_gradients(plan, offload) if plan.is_trained else None

    @property
    def members(self) -> tuple[Member, ...]:
        return self.plan.members

    @property
    def comm(self) -> Collectives:
        """The collectives among the ranks that share it."""
        return self.domain.comm

    @property
    def layout(self) -> FlatLayout:
        return self.plan.layout

    def true_name(self, index: int) -> str:
        """Return the name in the whole model of the member at `index`."""
        return self.domain.true_name(self.members[index].name)

    def true_names(self, index: int) -> tuple[str, ...]:
        """Return the names that all ranks have at `index`: several for experts."""
        return self.domain.true_names(self.members[index].name)

    def whole_shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of the member at `index`, the parts of all ranks together."""
        cut = self.domain.cut_of(self.members[index].param)
        return self.layout.slots[index].shape if cut is None else cut.shape

    def gather_parts(self, index: int, part: Tensor) -> Tensor:
        """Return the whole of a value of the member at `index`, of which each rank has its part.

        Order: a collective where the member is divided
        """
        member = self.members[index]
        parts, cuts = self.domain.parts, self.domain.cuts_of(member.param)
        if parts is None or cuts is None:
            return part
        return parts.gather(part, cuts, what=f"parameter '{member.name}'")

    def part_of(self, index: int, whole: Tensor) -> Tensor:
        """Return what this rank has of a value of the member at `index`."""
        cut = self.domain.cut_of(self.members[index].param)
        return whole if cut is None else cut.take(whole)

    @property
    def label(self) -> str:
        """Name of the sub-buffer in messages."""
        return self.plan.label

    @property
    def device(self) -> torch.device:
        return self.plan.device

    @property
    def residence(self) -> SubBufferResidence:
        """Places of its values between their uses."""
        return self.param_shard.residence

    @property
    def mesh(self) -> Mesh:
        """The ranks that share it."""
        return self.plan.mesh

    @property
    def is_sharded(self) -> bool:
        """True if the parameters are elsewhere between their uses."""
        return self.plan.is_sharded

    @property
    def is_trained(self) -> bool:
        """True if it has gradients, a master and states."""
        return self._gradients is not None

    @property
    def gradients(self) -> Gradients:
        """The gradients of trained parameters."""
        if self._gradients is None:
            raise AssertionError(f"{self.members[0].name} is frozen and has no gradients")
        return self._gradients

    def grad_chunk(self, index: int, *, num_chunks: int) -> Iterator[Tensor]:
        """Return a part of this rank's shard of the reduced gradients, in pieces:
        chunk `index` of the whole buffer's.
        """
        return (piece for _, piece in self.gradients.pieces(*self.plan.own_run(index, num_chunks=num_chunks)))

    def on_device(self, value: Tensor) -> Tensor:
        """Return the value, or a copy of it, where collectives can send it."""
        return value.to(self.device)

    # Calls for values that may lie on a disk between their uses:

    @property
    def _spills(self) -> Iterator[Spill]:
        for spill in (self.optimizer_shard.spill, self.param_shard.spill):
            if spill is not None:
                yield spill

    def start_in(self) -> None:
        """Begin to read all values that lie on a disk."""
        for spill in self._spills:
            spill.start_in()

    def finish_in(self) -> None:
        """Wait until all of them are in memory."""
        for spill in self._spills:
            spill.finish_in()

    def start_out(self) -> None:
        """Begin to write them."""
        for spill in self._spills:
            spill.start_out()

    def finish_out(self) -> None:
        """Wait until they are written, and give their memory back."""
        for spill in self._spills:
            spill.finish_out()

    @contextmanager
    def here(self, *, is_written: bool = False) -> Iterator[None]:
        """Have the values in memory inside; `is_written`: they change there.

        Not while a step is under way.
        """
        if self.before_use is not None:
            self.before_use(is_written)
        with ExitStack() as stack:
            for spill in self._spills:
                stack.enter_context(spill.here(is_written=is_written))
            yield

    def segments(self) -> tuple[Segment, ...]:
        """Return this rank's runs of equal optimizer group, but for what the step leaves alone."""
        if not self.optimizer_shard.frozen and not self.optimizer_shard.missed:
            return self._all_segments
        return self.layout.segments_of(
            self.plan.shard_index,
            num_shards=self.plan.num_shards,
            frozen=self.optimizer_shard.frozen,
            missed=self.optimizer_shard.missed,
        )

    def segments_of_members(self) -> Iterator[tuple[Segment, int, int]]:
        """Yield `segments` cut at parameters: the run, the parameter's index, and the place in it of the
        run's first element.
        """
        plan = self.plan
        return self.layout.cut_at_slots(self.segments(), plan.shard_index, num_shards=plan.num_shards)

    def name_of_part(self, index: int) -> str:
        """Return a name in the whole model of what this rank has of the member at `index`: other parts of the
        same parameter have other names.
        """
        name, cut = self.true_name(index), self.domain.cut_of(self.members[index].param)
        return name if cut is None else f"{name}[{cut.dim}:{cut.pieces[0].offset}]"

    def adopt_gradients(self) -> None:
        """Take over what the user did to `p.grad`; see `Gradients.adopt`.

        Errors: ConfigError if a parameter no longer lies in the flat buffer
        """
        if self.is_sharded:  # converting or moving a freed parameter is an error at once
            self.gradients.adopt()
            return
        self.param_shard.check_in_place()
        self.gradients.adopt()

    def hide(self) -> bool:
        """Let the parameters be placeholders, if they are not, and give the memory back;
        return whether it could be.

        What was written to them meanwhile is taken over.
        """
        self.cover()
        return self.param_shard.hide()

    def cover(self) -> None:
        """Let the parameters be placeholders, if they are not, and keep the memory; take over what was
        written.
        """
        if not self.param_shard.is_covered:
            self.take_writes()
            self.param_shard.writes.forget()
            self.param_shard.cover()

    @torch.no_grad()
    def take_edits(self, *, keeps_masters: bool = False) -> None:
        """Take into this rank's shard, and into the master, what was written to the parameters
        while they were here.

        `keeps_masters`: masters of elements that were not written keep the bits that the
        parameter has no room for.
        """
        params = self.param_shard
        with self.here(is_written=True):
            if self.is_sharded:
                params.kept.copy_(params.own_values())
            params.writes.must_compare = False
            if not self.is_sharded:
                params.writes.note()
            self.optimizer_shard.refresh_master(keeps_rest=keeps_masters)

    @torch.no_grad()
    def take_writes(self) -> None:
        """Take over, as `take_edits`, what the program has written by itself, if anything. Not a collective.

        Each rank takes its own shard from what it has written itself: ranks that write the same have what
        one process would.
        Errors: ConfigError where an update of the same values is under way
        """
        writes = self.param_shard.writes
        writes.look_back(f"a parameter of {self.label}")
        if not writes.are_due():
            return
        if writes.may_compare_late and self.refuses_writes is None and self._is_whole_on_gpu:
            writes.must_compare = False
            self._compare(writes.compare_late)
            return
        writes.must_compare, writes.is_known, is_counted = False, True, writes.are_counted
        if self.refuses_writes is not None:
            if is_counted:
                raise ConfigError(
                    f"a parameter of {self.label} ('{self.members[0].name}' is the first of them) "
                    f"was written by the program, and {self.refuses_writes} has an update of it "
                    "under way; leave that out"
                )
            return
        if is_counted:
            self.param_shard.check_in_place()
        if is_counted or not any(self._spills):  # reading a disk for it costs too much
            changed = self._compare(first_difference)
            if changed is not None:
                if not is_counted:
                    writes.say(f"parameter '{self._name_at(changed)}'")
                self.take_edits(keeps_masters=True)
        writes.note()

    @property
    def _is_whole_on_gpu(self) -> bool:
        """Whether its values and what they are compared with are there between their uses."""
        residence = self.residence
        return self.device.type == "cuda" and not (residence.params_on_host or residence.steps_on_host)

    def _compare(self, compare: Callable[[Tensor, Tensor], T]) -> T:
        """Return `compare` of this rank's parameters, [kept] or [shard], and their values as they are known
        to be.
        """
        params = self.param_shard
        if self.is_sharded:
            with params.here():
                return compare(params.own_values().to(params.kept.device), params.kept)
        with self.here():
            master = self.optimizer_shard.master
            return compare(params.own.to(master.device), master)

    def _name_at(self, place: int) -> str:
        """Return the name of the parameter in which this element of [kept] or [shard] lies."""
        axis, plan = self.mesh.shard, self.plan
        index, num_shards = (
            (axis.index, axis.size) if self.is_sharded else (plan.shard_index, plan.num_shards)
        )
        element = self.layout.shard_range(index, num_shards=num_shards)[0] + place
        for member, slot in zip(self.members, self.layout.slots, strict=True):
            if slot.offset <= element < slot.offset + slot.numel:
                return member.name
        raise AssertionError(f"element {element} of {self.label} belongs to no parameter, and was written")

    @property
    def has_copies(self) -> bool:
        """Whether what a program writes to the parameters must be taken into shards or masters."""
        return self.is_sharded or self.optimizer_shard.has_separate_master

    def copy_fragment(self, index: int, whole: Tensor, shard: Tensor) -> None:
        """Copy what this rank's shard holds of a value of the member at `index` into `shard`,
        [shard] of any dtype.
        """
        plan = self.plan
        plan.copy_fragment(index, whole, shard, plan.shard_index, num_shards=plan.num_shards)

    def refresh_master(self) -> None:
        """Take the parameters' values into the master, if it is a copy."""
        if self.optimizer_shard.has_separate_master:
            with self.here(is_written=True):
                self.optimizer_shard.refresh_master()

    def allocate_states(self, names: Sequence[str]) -> None:
        """Allocate zeros for the states of these names, and drop all others."""
        with self.here(is_written=True):
            self.optimizer_shard.allocate_states(names)

    def release(self) -> None:
        """Free gradients, master and states; the parameters stay where they are."""
        self.gradients.release()
        self._gradients = None
        self.optimizer_shard.release()
