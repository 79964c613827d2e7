"""The parameters of one sub-buffer: the flat values, what this rank keeps of them between their uses, and
their placeholders.

The model's parameters keep their identity, name, shape and leaf-ness:
`p.data` becomes a view of the flat values once.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...comm.collectives import Collectives
from ...comm.pending import Pending
from ...errors import ConfigError
from ...offload.device_copies import to_device, to_host
from ...offload.offload import Offload, SubBufferResidence
from ...offload.spill import Spill
from .early_parameter import early_of
from .flat_buffer import FlatBuffer
from .freed_parameter import FreedValues, Owner, Placeholder, put_all, sharded_until, take_away_all
from .layout import FlatLayout
from .param_status import detach
from .sub_buffer_plan import SubBufferPlan
from .valueless import is_valueless, note_memory
from .writes import Lying, Writes, check_in_place, collect, first_difference

_TAKEN: Any = (
    WeakTensorKeyDictionary()
)  # parameter -> weak reference to the last ParamShard that has taken it over


def holder_of(param: nn.Parameter) -> ParamShard | None:
    """Return the last that has taken this parameter over, if it is there still."""
    holder: ParamShard | None = _TAKEN.get(param, lambda: None)()
    return holder


class ShardOwner(Owner, Protocol):
    """A model."""

    def prepare_to_give(self, asked_for: frozenset[int]) -> None:
        """Have the parameters with these ids ready for another engine."""


class ParamShard:
    """This rank's part of the values, and all of them while they are here.

    Order: construction broadcasts from rank 0
    """

    convert: ClassVar[None] = None  # the dtype of freed parameters is that of the buffer

    def __init__(self, plan: SubBufferPlan, comm: Collectives) -> None:
        self._plan, self._comm = plan, comm
        self.residence = plan.residence
        # a shard waits for values that a load will bring, and nothing is ever whole here
        self._waits = plan.is_sharded and bool(plan.params) and all(map(is_valueless, plan.params))
        self.values = FlatBuffer(plan.layout, dtype=plan.dtype, device=plan.device, is_zero=not self._waits)
        self._placeholders: tuple[Placeholder, ...] = ()
        self.is_covered = False  # the parameters are placeholders
        self.kept = self.values.flat  # memory of the parameters between their uses; `own` is a part of it
        self.writes = Writes(plan.params)
        # by index: how often a tensor that a graph may have saved was replaced, where parameters are sharded
        self.num_changes = [0] * len(plan.members)
        starts = sorted((slot.offset, index) for index, slot in enumerate(plan.layout.slots) if slot.numel)
        self._offsets = [offset for offset, _ in starts]
        self._indices = [index for _, index in starts]
        self._aliases = tuple(alias for member in plan.members for alias in member.aliases)
        self._alias_places = [place for place, one in enumerate(plan.members) for _ in one.aliases]
        self.spill: Spill | None = None
        self._own: Tensor | None = None
        # called when a placeholder is about to be used; shows the parameter's values if this rank has them
        self.on_use: Callable[[], None] = _nothing
        self.owner: Callable[[], ShardOwner | None] = _no_owner  # the model
        # called when another engine takes a parameter over
        self.on_taken: Callable[[], None] = _nothing
        self._is_giving = False  # True while all values are here for another engine
        self._given: set[int] = set()  # indices

    @torch.no_grad()
    def take_over(self) -> Tensor | None:
        """Copy the parameters into the flat buffer, rank 0's everywhere, and make them views of it.

        Returns the master, if it is separate; it starts from the values before they are rounded to 16 bits.
        """
        plan, whole, reference = self._plan, self.values, weakref.ref(self)
        if plan.has_separate_master and not self._waits:
            whole = FlatBuffer(plan.layout, dtype=plan.master_dtype, device=plan.device)
        givers: dict[ParamShard, None] = {}
        has_values = False
        for param, view, own in zip(plan.params, whole.views, self.values.views, strict=True):
            early = early_of(param)
            if early is not None:  # one at a time, so a model made in zero.Init is never whole
                early.take_out()
            before = holder_of(param)
            if before is not None:
                before.on_taken()
                before.give(param)
                givers[before] = None
            if is_valueless(param):
                note_memory(param)
            else:
                view.copy_(param.detach())
                has_values = True
            param.data = own
            param.grad = None
            _TAKEN[param] = reference
        self._join_aliases()
        for giver in givers:
            giver.end_giving()
        if has_values:  # on all ranks, or on none
            self._comm.broadcast(whole.flat, what=plan.label)
        if whole is not self.values:
            self.values.flat.copy_(whole.flat)
        if not plan.has_separate_master:
            return None
        if self._waits:
            start, stop = plan.layout.shard_range(plan.shard_index, num_shards=plan.num_shards)
            shard = torch.zeros(stop - start, dtype=plan.master_dtype, device=plan.device)
        else:
            shard = whole.shard(plan.shard_index, num_shards=plan.num_shards)
        if plan.residence.steps_on_host:
            return to_host(shard, pin_memory=plan.residence.pins_states)
        return shard if self._waits else shard.clone()

    def _join_aliases(self) -> None:
        for alias, own in zip(self._aliases, self._shown_views[len(self._plan.params) :], strict=True):
            alias.data = own

    def give(self, param: nn.Parameter) -> None:
        """Let a parameter that is a placeholder have its values, for another one that takes it over.

        Order: a collective where parameters are sharded
        """
        if not self.is_covered:
            return
        if not self._is_giving:
            self.start_unshard().wait()
            self._is_giving = True
        index = next(index for index, one in enumerate(self._plan.params) if one is param)
        for place, one in enumerate(self._shown):
            if place == index or (place >= len(self._plan.params) and self._is_alias(place, index)):
                take_away_all((self._placeholders[place],), (one,), (self.values.views[index],))
        detach(param)
        self._given.add(index)

    def end_giving(self) -> None:
        """Keep the parameters that others have not taken over, as shards."""
        if self._is_giving:
            self._is_giving = False
            self.values.free_unless_referred_to()
        if len(self._given) == len(self._plan.members):
            self.drop()

    def drop(self) -> None:
        """Drop the memory of the parameters, if they are sharded."""
        if self._plan.is_sharded:
            nothing = FlatLayout(slots=(), numel=0, num_shards=1)
            self.values = FlatBuffer(nothing, dtype=self._plan.dtype, device=self._plan.device)
            self.kept, self.spill, self.is_covered = self.values.flat, None, False
            self._own = self.kept

    def give_back(self, taken: frozenset[int]) -> None:
        """Let the program have those whose ids are not among these, as plain parameters.

        Order: a collective where parameters are sharded
        """
        for param in self._plan.params:
            if id(param) not in taken and self.is_covered:
                self.give(param)
                param.data = param.detach().clone()
                for alias in next(one.aliases for one in self._plan.members if one.param is param):
                    alias.data = param.data
        self.end_giving()

    def settle(self, offload: Offload) -> None:
        """Keep this rank's part, once all have the values."""
        if self._plan.is_sharded:
            self.kept = self._copy_own()
            self.hide()  # without other names for the values, or their memory would stay
        elif self._plan.has_separate_master:
            self.writes.note()
        self.spill = offload.make_spill(
            self.residence.parameters,
            lambda: {"parameters": self.kept},
            what=f"parameters of {self._plan.label}",
        )
        # a tensor that a disk takes has other memory each time
        self._own = self._cut_own() if self.spill is None else None

    def _copy_own(self) -> Tensor:
        """Return what this rank keeps of the values that are here."""
        own = torch.zeros_like(self.own_values()) if self._waits else self.own_values()
        if self.residence.params_on_host:
            return to_host(own, pin_memory=self.residence.pins_parameters)
        return own if self._waits else own.clone()

    @property
    def own(self) -> Tensor:
        """[shard] The parameters that this rank's optimizer updates, as this rank keeps them."""
        return self._cut_own() if self._own is None else self._own

    def _cut_own(self) -> Tensor:
        plan = self._plan
        start, stop = plan.layout.shard_range(plan.shard_index, num_shards=plan.num_shards)
        kept_start = 0
        if plan.is_sharded:
            axis = plan.mesh.shard
            kept_start, _ = plan.layout.shard_range(axis.index, num_shards=axis.size)
        return self.kept[start - kept_start : stop - kept_start]

    def own_values(self) -> Tensor:
        """Return this rank's shard of the parameters, while they are here."""
        axis = self._plan.mesh.shard
        return self.values.shard(axis.index, num_shards=axis.size)

    def here(self, *, is_written: bool = False) -> AbstractContextManager[object]:
        """Have what this rank keeps in memory meanwhile; `is_written`: it is another afterwards."""
        return nullcontext() if self.spill is None else self.spill.here(is_written=is_written)

    # Calls for parameters that are not always here: sharded or offloaded.

    def start_unshard(self) -> Pending:
        """Begin to gather all values; call `show` when they are there.

        Errors: ConfigError while this rank's shard is offloaded
        """
        return self._start_gather(self.values)

    @torch.no_grad()
    def gather_copy(self) -> tuple[Tensor, ...]:
        """Return the values of all members, in memory of their own; the parameters stay as they are.

        Order:  a collective
        Errors: as start_unshard
        """
        whole = FlatBuffer(self._plan.layout, dtype=self._plan.dtype, device=self._plan.device)
        self._start_gather(whole).wait()
        return whole.views

    def _start_gather(self, whole: FlatBuffer) -> Pending:
        if self.is_parked:
            raise ConfigError(
                f"parameter '{self._plan.names[0]}' is needed, but engine.offload_states() has moved this "
                "rank's shard to host memory; call engine.reload_states() first"
            )
        axis = self._plan.mesh.shard
        if not axis.is_alone:  # and not in the stream in which an offloaded shard comes
            self._comm.wire.before_gather(self._plan.label)
        whole.allocate()
        if not self.residence.parameters.is_away:
            return self._comm.all_gather_from(self.kept, whole.flat, what=self._plan.label)

        def own() -> Tensor:
            return whole.shard(axis.index, num_shards=axis.size)

        def gather_others() -> Pending:
            if axis.is_alone:
                return Pending.done()
            return self._comm.all_gather_from(own(), whole.flat, what=self._plan.label)

        if self.spill is None:
            return to_device(self.kept, own(), then=gather_others)
        with self.spill.here(is_written=False):
            kept, when_read = self.spill.lend(self.kept)
            return to_device(kept, own(), then=gather_others, when_read=when_read)

    def start_read(self) -> None:
        """Begin to read what `start_unshard` needs, if it lies on a disk."""
        if self.spill is not None:
            self.spill.start_in()

    @torch.no_grad()
    def show(self) -> None:
        """Let the parameters have their values.

        Errors: ConfigError if one has been written to meanwhile
        """
        self.is_covered = False
        take_away_all(self._placeholders, self._shown, self._shown_views)
        self.writes.note()

    @torch.no_grad()
    def cover(self) -> None:
        """Let the parameters be placeholders."""
        self._placeholders = self._placeholders or tuple(
            Placeholder(name, param, self, dtype=view.dtype, device=view.device)
            for name, param, view in zip(self._shown_names, self._shown, self._shown_views, strict=True)
        )
        put_all(self._placeholders, self._shown)
        self.is_covered = True

    # The parameters, and behind them other names of their values, which come and go with them:

    @cached_property
    def _shown(self) -> tuple[nn.Parameter, ...]:
        return (*self._plan.params, *self._aliases)

    @property
    def _shown_names(self) -> tuple[str, ...]:
        return (*self._plan.names, *(self._plan.names[place] for place in self._alias_places))

    @property
    def _shown_views(self) -> tuple[Tensor, ...]:
        views = self.values.views
        return (*views, *(views[place] for place in self._alias_places)) if self._aliases else views

    def _is_alias(self, place: int, index: int) -> bool:
        return self._alias_places[place - len(self._plan.params)] == index

    def hide(self) -> bool:
        """Let the parameters be placeholders, if they are not, and give the memory back;
        return whether it could be.
        """
        if not self.is_covered:
            self.writes.forget()
            self.cover()
        return self.values.free_unless_referred_to()

    @property
    def has_silent(self) -> bool:
        """Whether a parameter that is a placeholder now does not tell when it is used."""
        return not all(placeholder.tells for placeholder in self._placeholders)

    @property
    def why_away(self) -> str:
        """Explain where the values of placeholders are, and when they can be used."""
        if self.is_parked:
            return (
                "its values are in host memory, where engine.offload_states() has put them; call "
                "engine.reload_states() first"
            )
        return sharded_until("while the module that owns it runs")

    def unshard_for(self, leaves: Sequence[Any], *, is_use: bool) -> None:
        """Let the parameters have their values, if those are here. An operation is about to use one."""
        self.on_use()

    def note_name(self, values: FreedValues) -> None:
        """Ignore a new name for the values: a parameter is here again and again."""

    def note_copy(self, copy: nn.Parameter) -> None:
        """Ignore a copy of a parameter: it is like any other."""

    @property
    def is_parked(self) -> bool:
        """True if the memory of this rank's values was given up."""
        return self._plan.layout.numel > 0 and self.own.untyped_storage().nbytes() == 0

    @property
    def is_edited(self) -> bool:
        """Whether the values that are here differ from this rank's shard of them."""
        with self.here():
            return first_difference(self.own_values().to(self.kept.device), self.kept) is not None

    # Writes of a program to the parameters, and replacements of them:

    def note_change(self, indices: Iterable[int] | None = None) -> None:
        """Other values have replaced the parameters', all or those at `indices`,
        without a write that torch counts.

        A graph that has saved the old ones is out of date: its backward is an error, as it is after a step of
        torch's optimizers.
        """
        changed = range(len(self._plan.members)) if indices is None else tuple(indices)
        if self._plan.is_sharded:
            for index in changed:
                self.num_changes[index] += 1
            return
        torch.autograd.graph.increment_version([self._plan.params[index] for index in changed])
        self.writes.expect(len(changed))

    def index_at(self, offset: int) -> int:
        """Return the place of the member that has the element at `offset` of the buffer."""
        return self._indices[bisect_right(self._offsets, offset) - 1]

    def _is_anothers(self, param: nn.Parameter) -> bool:
        taken: weakref.ref[ParamShard] = _TAKEN[param]
        return taken() is not self

    def check_in_place(self) -> None:
        """Errors: ConfigError if a parameter no longer lies in the flat buffer"""
        check_in_place(self._lying(), is_anothers=self._is_anothers)

    def collect(self) -> None:
        """Copy what a program has put in the place of parameters by `p.data = ...` to where they lie.

        Errors: ConfigError for a tensor of another shape
        """
        collect(self._lying())

    def _lying(self) -> Iterator[Lying]:
        for member, view in zip(self._plan.members, self.values.views, strict=True):
            yield Lying(member.param, view, member.name)

    def load(self, index: int, whole: Tensor) -> None:
        """Set the member at `index` to values of its shape, wherever they lie."""
        if not self._plan.is_sharded:
            self.values.views[index].copy_(whole)  # writes to parameters themselves are the program's
            return
        axis = self._plan.mesh.shard
        with self.here(is_written=True):
            self._plan.copy_fragment(index, whole, self.kept, axis.index, num_shards=axis.size)

    def restore_all(self) -> None:
        """Keep all values here from now on, as they are."""
        if self._plan.is_sharded and self.residence.parameters.is_away:
            self.kept = self.own_values()
        self.spill, self.residence = None, SubBufferResidence()
        self._own = self._cut_own()


def _no_owner() -> None:
    """Return None: parameters that are neither trained nor sharded have no owner."""


def _nothing() -> None:
    """Do nothing when a placeholder is used."""
