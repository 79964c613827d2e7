"""A sub-buffer: the parameters of one unit that share a dtype and a role, in one flat buffer.

A flat buffer has one dtype, and only trained parameters need gradients and optimizer states. The model's parameters keep their
identity, name, shape and leaf-ness: `p.data` becomes a view of the flat parameters once; what becomes of `p.grad` is the matter of
gradients.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..comm.collectives import Collectives, Pending
from ..comm.mesh import Mesh
from ..errors import ConfigError
from ..offload.device_copies import bring, to_host
from ..offload.offload import Offload, PartHome
from ..placement.precision import Precision
from ..placement.stage_policy import Placement, Policy
from .flat_buffer import FlatBuffer
from .freed_parameter import Placeholder, put_all, take_away_all
from .gradients import Gradients
from .layout import Segment, plan_layout
from .make_gradients import make_gradients
from .param_home import early_of
from .writes import Writes, check_in_place, differences, first_changed

NO_GROUP = -1  # a parameter that no optimizer group contains


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A parameter, its full name and the optimizer group that trains it (NO_GROUP: none)."""

    name: str
    param: nn.Parameter
    group: int

    @property
    def is_trained(self) -> bool:
        return self.param.requires_grad and self.group != NO_GROUP


class MadeAside(Protocol):
    """A sub-buffer's update in the step that is under way, made by somebody else."""

    def publish(self) -> None:
        """Let its results be the sub-buffer's."""

    def drop(self) -> None:
        """Let it come to nothing."""


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
        offload: Offload,
    ) -> None:
        self.members = tuple(members)
        self._params = tuple(member.param for member in members)
        self.label = f"unit '{unit}'"
        self.is_trained = members[0].is_trained
        self.home = offload.home_of(
            sum(member.param.numel() for member in members), is_trained=self.is_trained
        )
        self.device = device
        self._comm = comm
        mesh = comm.mesh
        # Parameters that are elsewhere between their uses come and go as those in shards do, with one rank too.
        stays = mesh.shard.is_alone and not self.home.parameters.is_away
        self.is_sharded = policy.parameters is Placement.SHARDED and not stays
        self.layout = plan_layout(
            [tuple(member.param.shape) for member in members],
            groups=[member.group for member in members],
            num_shards=mesh.world.size,
            itemsize=min(dtype.itemsize, (precision.sent or dtype).itemsize),
        )
        # of gradients, masters and states; of sharded parameters there may be fewer, and `kept` is one of those
        self.shard_index, self.num_shards = mesh.state_index, mesh.num_states
        self._all_segments = self.layout.segments(self.shard_index, num_shards=self.num_shards)
        self.values = FlatBuffer(self.layout, dtype=dtype, device=device)
        self._placeholders: tuple[Placeholder, ...] = ()
        self.is_covered = False  # the parameters are placeholders
        # what this rank holds of the parameters between their uses; param_shard is a part of it
        self.kept = self.values.flat
        self.writes = Writes(member.param for member in self.members)
        self.states: dict[str, Tensor] = {}  # [shard] float32 by name: the optimizer's, beside the master
        self._param_shard: Tensor | None = None
        self._master = self._take_over(comm)
        if self.is_sharded:
            self._keep_shard_only()
        elif self.has_separate_master:
            self.writes.note()
        self._state_spill = offload.make_spill(self.home.states, self._stored)
        self._param_spill = offload.make_spill(self.home.parameters, self._stored_params)
        # the memory of what a disk takes is another each time
        self._param_shard = self._cut_param_shard() if self._param_spill is None else None
        self._spills = [spill for spill in (self._state_spill, self._param_spill) if spill is not None]
        self.start_out()
        self.finish_out()
        # place -> states by name, of members that the optimizer sees whole; empty on ranks that do not own the member
        self.states_of_whole: dict[int, Callable[[], dict[str, Any]]] = {}
        # places of members that the coming step leaves alone, and how many steps have done so before
        self.frozen: frozenset[int] = frozenset()
        self.missed: dict[int, int] = {}
        self.made_aside: MadeAside | None = None
        self.refuses_writes: str | None = None  # the key that makes them impossible
        # called before somebody outside the step uses master or states; the argument: they will be written
        self.before_use: Callable[[bool], None] | None = None
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
                home=self.home,
                offload=offload,
                norm_run=self.own_run(mesh.chunk_index, num_chunks=mesh.world.size),
            )

    @property
    def mesh(self) -> Mesh:
        """The ranks that share it."""
        return self._comm.mesh

    @property
    def gradients(self) -> Gradients:
        """The gradients of trained parameters."""
        if self._gradients is None:
            raise AssertionError(f"{self.members[0].name} is frozen and has no gradients")
        return self._gradients

    def grad_chunk(self, index: int, *, num_chunks: int) -> Iterator[Tensor]:
        """Return a part of this rank's shard of the reduced gradients, in pieces: chunk `index` of the whole buffer's."""
        return (piece for _, piece in self.gradients.pieces(*self.own_run(index, num_chunks=num_chunks)))

    def own_run(self, index: int, *, num_chunks: int) -> tuple[int, int]:
        """Return where chunk `index` of the whole buffer begins and ends in this rank's shard."""
        start, stop = self.layout.shard_range(index, num_shards=num_chunks)
        own_start, _ = self.layout.shard_range(self.shard_index, num_shards=self.num_shards)
        return start - own_start, stop - own_start

    @property
    def param_shard(self) -> Tensor:
        """[shard] The parameters that this rank's optimizer updates, as this rank keeps them."""
        return self._cut_param_shard() if self._param_shard is None else self._param_shard

    def _cut_param_shard(self) -> Tensor:
        start, stop = self.layout.shard_range(self.shard_index, num_shards=self.num_shards)
        kept_start = 0
        if self.is_sharded:
            axis = self._comm.mesh.shard
            kept_start, _ = self.layout.shard_range(axis.index, num_shards=axis.size)
        return self.kept[start - kept_start : stop - kept_start]

    @property
    def master(self) -> Tensor:
        """[shard] float32, what the optimizer updates; float32 parameters in the same memory are their own master."""
        return self.param_shard if self._master is None else self._master

    @property
    def has_separate_master(self) -> bool:
        """Whether the optimizer updates a float32 copy that must be rounded into the parameters, or brought to them."""
        return self.is_trained and (self.values.flat.dtype != torch.float32 or self.home.is_apart)

    def make_param_out(self) -> Tensor | None:
        """Return memory, [shard], for the rounded parameters where the optimizer steps; None if the master is the parameter."""
        if not self.has_separate_master:
            return None
        own, pinned = self.param_shard, self.home.pins_states
        # Padding is no segment's, so nobody writes it; nor what the step leaves alone.
        out = torch.zeros(own.numel(), dtype=own.dtype, device=self.master.device, pin_memory=pinned)
        return out.copy_(own) if self.frozen else out

    def allocate_states(self, names: Sequence[str]) -> None:
        """Have zeros in the states of these names, and no other."""
        numel, device, pinned = self.master.numel(), self.master.device, self.home.pins_states
        with self.here(is_written=True):
            self.states = {
                name: torch.zeros(numel, dtype=torch.float32, device=device, pin_memory=pinned)
                for name in names
            }

    def on_device(self, value: Tensor) -> Tensor:
        """Return it, or a copy of it, where collectives can send it."""
        return value.to(self.device)

    # What may lie on a disk between its uses: `master` and `states`, and `kept` where parameters are sharded.

    def start_in(self) -> None:
        """Begin to read all of it."""
        for spill in self._spills:
            spill.start_in()

    def finish_in(self) -> None:
        """Have all of it in memory."""
        for spill in self._spills:
            spill.finish_in()

    def start_out(self) -> None:
        """Begin to write all of it."""
        for spill in self._spills:
            spill.start_out()

    def finish_out(self) -> None:
        """Have it written, and give its memory back."""
        for spill in self._spills:
            spill.finish_out()

    @contextmanager
    def here(self, *, is_written: bool = False) -> Iterator[None]:
        """Have it in memory meanwhile; `is_written`: it is another afterwards. Not while a step is under way."""
        if self.before_use is not None:
            self.before_use(is_written)
        with ExitStack() as stack:
            for spill in self._spills:
                stack.enter_context(spill.here(is_written=is_written))
            yield

    def _stored(self) -> dict[str, Tensor]:
        return self.states if self._master is None else {"master": self._master, **self.states}

    def _stored_params(self) -> dict[str, Tensor]:
        return {"parameters": self.kept}

    def segments(self) -> tuple[Segment, ...]:
        """Return this rank's runs of equal optimizer group, but for what the step leaves alone."""
        if not self.frozen and not self.missed:
            return self._all_segments
        return self.layout.segments_of(
            self.shard_index, num_shards=self.num_shards, frozen=self.frozen, missed=self.missed
        )

    def adopt_gradients(self) -> None:
        """Take over what the user did to `p.grad`; see `Gradients.adopt`.

        Errors: ConfigError if a parameter no longer lies in the flat buffer
        """
        if self.is_sharded:  # whoever converts or moves a freed parameter is told so at once
            self.gradients.adopt()
            return
        check_in_place(self)
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
        if not self.home.parameters.is_away:
            return self._comm.gather_from(self.kept, self.values.flat, what=self.label)
        with self._params_here():
            return bring(self.kept, self._own_values(), then=self._gather_others)

    def start_read(self) -> None:
        """Begin to read what `start_gather` needs, if it lies on a disk."""
        if self._param_spill is not None:
            self._param_spill.start_in()

    def _params_here(self, *, is_written: bool = False) -> AbstractContextManager[object]:
        return nullcontext() if self._param_spill is None else self._param_spill.here(is_written=is_written)

    def _gather_others(self) -> Pending:
        if self._comm.mesh.shard.is_alone:
            return Pending.done()
        return self._comm.gather_from(self._own_values(), self.values.flat, what=self.label)

    @torch.no_grad()
    def show(self) -> None:
        """Let the parameters have their values.

        Errors: ConfigError if somebody has written to one meanwhile
        """
        self.is_covered = False
        take_away_all(self._placeholders, self._params, self.values.views)
        self.writes.note()

    @torch.no_grad()
    def cover(self) -> None:
        """Let the parameters be placeholders."""
        self._placeholders = self._placeholders or tuple(
            Placeholder(member.name, member.param, dtype=view.dtype, device=view.device)
            for member, view in zip(self.members, self.values.views, strict=True)
        )
        put_all(self._placeholders, self._params)
        self.is_covered = True

    def hide(self) -> bool:
        """Let the parameters be placeholders, if they are not, and give the memory back; return whether it could be.

        What was written to them meanwhile is taken over.
        """
        if not self.is_covered:
            self.take_writes()
            self.writes.forget()
            self.cover()
        return self.values.free_unless_referred_to()

    @property
    def has_subclasses(self) -> bool:
        """Whether a parameter that is a placeholder now is of a class of its own."""
        return not all(placeholder.is_plain for placeholder in self._placeholders)

    @property
    def is_offloaded(self) -> bool:
        """Whether the memory of what this rank holds of the values was given up."""
        return self.layout.numel > 0 and self.param_shard.untyped_storage().nbytes() == 0

    @property
    def is_edited(self) -> bool:
        """Whether the values that are here differ from this rank's shard of them."""
        with self._params_here():
            return not torch.equal(self._own_values().to(self.kept.device), self.kept)

    @torch.no_grad()
    def take_edits(self, *, keeps_masters: bool = False) -> None:
        """Take into this rank's shard, and into the master, what was written to the parameters while they were here.

        `keeps_masters`: masters of elements that were not written keep the bits that the parameter has no room for.
        """
        with self.here(is_written=True):
            if self.is_sharded:
                self.kept.copy_(self._own_values())
            self.writes.must_compare = False
            if not self.is_sharded:
                self.writes.note()
            if not keeps_masters:
                self.refresh_master()
            elif self.has_separate_master:
                new = self.param_shard.to(self.master.device)
                self.master.copy_(torch.where(new != self.master.to(new.dtype), new.float(), self.master))

    @torch.no_grad()
    def take_writes(self) -> None:
        """Take over, as `take_edits`, what the program has written by itself, if anything. Not a collective.

        Each rank takes its own shard from what it has written itself: ranks that write the same have what one process would.
        Errors: ConfigError where an update of the same values is under way
        """
        writes = self.writes
        if not writes.are_due():
            return
        writes.must_compare, is_counted = False, writes.are_counted
        if self.refuses_writes is not None:
            if is_counted:
                raise ConfigError(
                    f"a parameter of {self.label} ('{self.members[0].name}' is the first of them) was written by the program, and "
                    f"{self.refuses_writes} has an update of it under way; leave that out"
                )
            return
        if is_counted:
            check_in_place(self)
        if is_counted or not self._spills:  # to read a disk for it costs too much
            known = self._known_values()
            changed = differences(*known)
            if changed is not None:
                if not is_counted:
                    writes.say(first_changed(self, changed))
                self.take_edits(keeps_masters=True)
        writes.note()

    def _known_values(self) -> tuple[Tensor, Tensor]:
        """What this rank's parameters are, [kept] or [shard], and what they are known to be."""
        if self.is_sharded:
            with self._params_here():
                return self._own_values().to(self.kept.device), self.kept
        with self.here():
            new = self.param_shard.to(self.master.device)
            return new, self.master.to(new.dtype)

    @property
    def has_copies(self) -> bool:
        """Whether what a program writes to the parameters must be taken into shards or masters."""
        return self.is_sharded or self.has_separate_master

    def load(self, place: int, whole: Tensor) -> None:
        """Set the member at `place` to values of its shape, wherever they lie."""
        if not self.is_sharded:
            self.values.views[place].copy_(whole)  # not the parameter, whose writes are the program's
            return
        axis = self._comm.mesh.shard
        with self._params_here(is_written=True):
            self._copy_fragment(place, whole, self.kept, axis.index, axis.size)

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
            with self.here(is_written=True):
                self.master.copy_(self.param_shard)

    def come_home(self) -> None:
        """Let all values be here for good; those of the parameters are."""
        if self.is_sharded and self.home.parameters.is_away:
            self.kept = self._own_values()
        self._state_spill, self._param_spill, self._spills = None, None, []
        self.home = PartHome()
        self._param_shard = self._cut_param_shard()

    def release(self) -> None:
        """Free gradients and master; the parameters stay where they are."""
        self.gradients.release()
        self._gradients, self.is_trained = None, False
        self.states, self.states_of_whole = {}, {}
        self._master = None

    def _take_over(self, comm: Collectives) -> Tensor | None:
        """Copy the parameters into the flat buffer, rank 0's everywhere, and make them views of it.

        Returns the master, if it is separate; it starts from the values before they are rounded to 16 bits.
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
        if not self.has_separate_master:
            return None
        shard = whole.shard(self.shard_index, num_shards=self.num_shards)
        return to_host(shard, pin_memory=self.home.pins_states) if self.home.steps_on_host else shard.clone()

    def _keep_shard_only(self) -> None:
        pinned, goes = self.home.pins_parameters, self.home.params_on_host
        self.kept = to_host(self._own_values(), pin_memory=pinned) if goes else self._own_values().clone()
        self.hide()

    def _own_values(self) -> Tensor:
        """Return this rank's shard of the parameters, while they are here."""
        axis = self._comm.mesh.shard
        return self.values.shard(axis.index, num_shards=axis.size)
