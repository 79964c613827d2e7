"""Parameters that are here for a while, because the program asks for them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..comm.rank_group import RankGroup
from ..errors import ConfigError
from ..log import logger
from .access.access import check_transform
from .access.whole_parameters import WholeParameters
from .model.sharded_model import ShardedModel
from .param_location import ParamLocation, location_of
from .parameters.early_parameter import EarlyParameter, InitContext, early_of
from .parameters.wrapped import leaves_of
from .stand_ins import stand_in_of
from .units.sub_buffer import SubBuffer

T = TypeVar("T")
_SAY_WHOSE = "say whose values count: GatheredParameters(params, modifier_rank=0)"


class _Keeps:
    """The one model of a block in which parameters are read; see `KeepsValues`."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self.is_right = False  # until the block has ended without a write or an error

    def are_right(self) -> bool:
        """Whether the program has written nothing."""
        return self.is_right

    def have_all(self, has: bool) -> bool:
        """Whether all ranks that gather have the values."""
        told = self._model.domains.holders.all_gather_numbers(
            [has], device=self._model.device, what="whether a unit is kept"
        )
        return all(one for (one,) in told)


class GatheredParameters:
    """Inside `with GatheredParameters(params):` every rank has these parameters whole, to be read.

    With `modifier_rank=r` they may also be written, all ranks get rank r's values at the end, and so do the
    optimizer's float32 masters. Parameters that neither an engine nor zero.Init has are left alone, as are
    objects that are no tensors. It may be nested.
    Order:  a collective at both ends
    Errors: ConfigError if sharded parameters were written without a modifier_rank. In programs written for
            DeepSpeed such a write is lost, as there, and a warning says so, unless the ds_config's
            `enable_sanity_checks` is true.
    Source: DeepSpeed 0.19.8 runtime/zero/partition_parameters.py, `GatheredParameters`
    """

    def __init__(
        self,
        params: Tensor | Iterable[Any] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        """`fwd_module` is not needed here: what a forward uses is brought by its use."""
        given = [params] if isinstance(params, Tensor) or not isinstance(params, Iterable) else list(params)
        tensors = [one for one in given if isinstance(one, Tensor)] if enabled else []
        wanted = [leaf for one in tensors for leaf in leaves_of(one)]
        # Sort into one order for every rank: programs give sets, too, whose order differs from rank to rank.
        locations = [location for param in wanted if (location := location_of(param)) is not None]
        self._locations = sorted(locations, key=lambda location: location.place)
        early = {early for param in wanted if (early := early_of(param)) is not None}
        self._early = sorted(early, key=lambda one: one.order)
        stand_ins = {found for param in wanted if (found := stand_in_of(param)) is not None}
        self._stand_ins = sorted(stand_ins, key=lambda one: one.name)
        self._modifier_rank = modifier_rank
        self._versions: list[int] = []
        self._is_open_ended = False
        self._keeps: _Keeps | None = None
        self._open = ExitStack()
        # edits of models that have no engine yet; they end before the program's writes go to other ranks
        self._edits = ExitStack()
        # contexts in which an edit around this one lets a rank run alone already
        self._inner: list[InitContext] = []
        self._whole = WholeParameters(
            (location.sub_buffer, location.member_index) for location in _unique(self._locations)
        )

    def __enter__(self) -> None:
        self._check_modifier()
        models = _unique(location.model for location in self._locations)
        is_read = self._modifier_rank is None and not self._is_open_ended and not self._early
        self._keeps = _Keeps(models[0]) if is_read and len(models) == 1 else None
        for model in models:
            units = {location.unit for location in self._locations if location.model is model}
            gathered = [unit for unit in model.units if unit in units]
            self._open.enter_context(model.gathered(gathered, keeps=self._keeps))
            if not self._is_open_ended:
                self._open.enter_context(model.saved_values())
        for init, params in self._by_init().items():
            if init.use_in_edit(params, self._modifier_rank):
                self._inner.append(init)
            for early in params:
                self._open.enter_context(early.held())
            if self._modifier_rank is not None and init not in self._inner:
                self._edits.enter_context(init.edited_by(self._modifier_rank, params))
        for sub_buffer in self._sharded_sub_buffers:
            sub_buffer.take_writes()  # writes of a forward that has just ended
        self._whole.open()
        self._versions = [_param(location)._version for location in self._locations]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._open:
            try:
                self._edits.__exit__(kind, error, trace)
                if kind is None:
                    self._end(self._modifier_rank)
            finally:
                self._whole.close()
                self._forget_writes()
        check_transform(error)

    def _check_modifier(self) -> None:
        rank = self._modifier_rank
        models = _unique(location.model for location in self._locations)
        holders = [
            *(model.domains.holder_ranks for model in models),
            *(tuple(range(init.job.size)) for init in self._inits),
        ]
        for ranks in [] if rank is None else holders:
            if not isinstance(rank, int) or not 0 <= rank < len(ranks):
                raise ConfigError(
                    f"GatheredParameters(modifier_rank={rank!r}): must be a whole number from 0 to "
                    f"{len(ranks) - 1}; it counts the ranks that hold these layers, here "
                    f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of the job"
                )

    @property
    def _inits(self) -> list[InitContext]:
        return _unique(early.init for early in self._early)

    def _by_init(self) -> dict[InitContext, list[EarlyParameter]]:
        return {init: [early for early in self._early if early.init is init] for init in self._inits}

    @property
    def _outer_early(self) -> list[EarlyParameter]:
        """Early parameters of which this is the outermost edit, or reading."""
        return [early for early in self._early if early.init not in self._inner]

    def open(self) -> None:
        """Enter; `close` leaves, whatever is entered and left meanwhile."""
        self._is_open_ended = True
        self.__enter__()

    def close(self, *, modifier_rank: int | None) -> None:
        """Leave; `modifier_rank` is the rank whose values count, which may be known only now."""
        with self._open:
            try:
                self._end(modifier_rank)
            finally:
                self._whole.close()
                self._forget_writes()

    @property
    def _sharded_sub_buffers(self) -> list[SubBuffer]:
        return _unique(location.sub_buffer for location in self._locations if location.sub_buffer.is_sharded)

    def _forget_writes(self) -> None:
        """Drop all writes: those to be kept have been taken over, the rest is lost when the values go."""
        for model in _unique(location.model for location in self._locations):
            model.forget_writes(
                _unique(location.unit for location in self._locations if location.model is model)
            )

    def _end(self, modifier_rank: int | None) -> None:
        if modifier_rank is not None:
            self._share_wholes(modifier_rank)
        self._whole.close()
        if modifier_rank is not None:
            self._spread(modifier_rank)
        else:
            self._end_reading()

    @property
    def _owners(self) -> list[ShardedModel | InitContext]:
        return _unique([*(location.model for location in self._locations), *self._inits])

    @property
    def _loses_writes(self) -> bool:
        """True if all that is here belongs to a program written for DeepSpeed; the same on all ranks."""
        return all(owner.loses_writes for owner in self._owners)

    def _written(self) -> list[str]:
        written = [
            location.name
            for location, version in zip(self._locations, self._versions, strict=True)
            if location.sub_buffer.is_sharded
            and (
                _param(location)._version != version
                or not _param(location).is_set_to(
                    location.sub_buffer.param_shard.values.views[location.member_index]
                )
                or location.sub_buffer.param_shard.is_edited
            )
        ]
        return written + [early.name for early in self._outer_early if early.is_edited]

    def _end_reading(self) -> None:
        if self._loses_writes:
            untold = [owner for owner in self._owners if not owner.has_lost_writes]
            # to compare all values each time would cost
            written = self._written() if untold or self._keeps is not None else []
            if untold and written:
                self._warn_of_writes(written, untold)
        else:
            written = self._written()
            self._check_unchanged(written)
        if self._keeps is not None:
            self._keeps.is_right = not written

    def _warn_of_writes(self, written: list[str], untold: list[ShardedModel | InitContext]) -> None:
        """Warn once for each owner."""
        logger.warning(
            "parameter '%s' was written inside GatheredParameters without modifier_rank, so what was written "
            "is lost, as with DeepSpeed; %s",
            written[0],
            _SAY_WHOSE,
        )
        for owner in untold:
            owner.has_lost_writes = True

    def _check_unchanged(self, written: list[str]) -> None:
        # Tell all ranks that gather these parameters: otherwise those that saw nothing would go on to a
        # collective and wait for the others there.
        groups: dict[RankGroup, torch.device] = {
            location.model.domains.holders: location.sub_buffer.device
            for location in self._locations
            if location.sub_buffer.is_sharded
        }
        groups |= {early.init.job: early.init.device for early in self._outer_early}
        flags = [
            group.all_gather_numbers([bool(written)], device=device, what="edits of parameters")
            for group, device in groups.items()
        ]
        if any(flag for of_group in flags for (flag,) in of_group):
            which = f"parameter '{written[0]}' was" if written else "parameters were"
            raise ConfigError(
                f"{which} written inside GatheredParameters without modifier_rank: of such an in-place "
                f"modification each rank would keep what it wrote to its own shard; {_SAY_WHOSE}"
            )

    @torch.no_grad()
    def _share_wholes(self, rank: int) -> None:
        """Send the wholes of rank `rank` to all ranks, where some hold other parts or copies than this one;
        ranks that hold other parameters of the same names get none.
        """
        for location in _unique(self._locations):
            domains, domain = location.model.domains, location.sub_buffer.domain
            if _is_shared_whole(location):
                whole = _param(location).data.clone(memory_format=torch.contiguous_format)
                domains.holders.broadcast(whole, what=f"parameter '{location.name}'", source=rank)
                if domain.names is None or domains.place_among_sharers(domain, rank) is not None:
                    _param(location).copy_(whole)

    @torch.no_grad()
    def _spread(self, rank: int) -> None:
        for model in _unique(location.model for location in self._locations):
            model.before_change()
        sources = {location.sub_buffer: _source(location, rank) for location in self._locations}
        for sub_buffer in sources:
            sub_buffer.param_shard.collect()
            source = sources[sub_buffer]
            sub_buffer.comm.broadcast(
                sub_buffer.param_shard.values.flat, what=sub_buffer.label, source=source
            )
            sub_buffer.take_edits(keeps_masters=True)
            # Only rank `rank` knows what was written; torch has counted it where nothing is sharded.
            if sub_buffer.is_sharded:
                sub_buffer.param_shard.note_change(
                    location.member_index for location in self._locations if location.sub_buffer is sub_buffer
                )
        for stand_in in self._stand_ins:
            stand_in.spread(rank)
        for early in self._outer_early:
            early.spread(rank)
        for init, params in self._by_init().items():
            if init in self._inner:
                init.spread_in_edit(params)


def _is_shared_whole(location: ParamLocation) -> bool:
    """True if more ranks want the written value than those that share the parameter."""
    return location.model.domains.axes.tp > 1 or location.sub_buffer.domain.parts is not None


def _source(location: ParamLocation, rank: int) -> int:
    """Return which of the ranks that share a parameter has the value written by rank `rank`; the first of
    those that share another one of the same name.
    """
    if _is_shared_whole(location):
        return 0  # all ranks have the value by now
    domain = location.sub_buffer.domain
    if domain.names is None:
        return rank
    return location.model.domains.place_among_sharers(domain, rank) or 0


def _param(location: ParamLocation) -> nn.Parameter:
    return location.sub_buffer.members[location.member_index].param


def _unique(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))
