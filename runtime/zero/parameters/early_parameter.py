"""A parameter that is sharded before `initialize()`, and the record that zero.Init keeps of it."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ...comm.collectives import Collectives
from ...comm.rank_group import Job
from .freed_parameter import FreedValues, Placeholder, sharded_until
from .param_status import detach
from .writes import first_difference

# parameter that no model has yet -> its record; the map keeps no parameter alive
_EARLY: Any = WeakTensorKeyDictionary()


class InitContext(Protocol):
    """Calls of an early parameter to the zero.Init that has made it."""

    number: int  # counts this rank's contexts
    comm: Collectives
    job: Job
    device: torch.device
    keeps_on_host: bool  # shards wait in host memory, and a rank that is alone has them, too
    loses_writes: bool
    has_lost_writes: bool
    has_left_out: bool

    def unshard_for(self, tensors: Iterable[Any], *, is_use: bool) -> None:
        """Have the early parameters among these here."""

    def edited_by(self, rank: int, params: Sequence[EarlyParameter]) -> AbstractContextManager[None]:
        """Let this rank run alone meanwhile; what it writes to others than these is taken over."""

    def use_in_edit(self, params: Sequence[EarlyParameter], rank: int | None) -> bool:
        """Have these here, if one rank may run alone already; False if not."""

    def spread_in_edit(self, params: Sequence[EarlyParameter]) -> None:
        """Take the values that the rank which runs alone has written to these parameters."""

    def note(self, param: nn.Parameter, name: str) -> None:
        """Shard this parameter soon."""

    def shard_among(self, made: Container[EarlyParameter]) -> None:
        """Shard the parameters of `made` that are whole and not in use."""

    def let_go(self, early: EarlyParameter) -> None:
        """Leave this parameter to others."""

    def describe(self, early: EarlyParameter) -> None:
        """Attach the attributes by which DeepSpeed's callers know the parameter."""


def early_of(param: Tensor) -> EarlyParameter | None:
    """Return the parameter's record; None unless zero.Init has it, and no engine yet."""
    early: EarlyParameter | None = _EARLY.get(param)
    return early


class EarlyParameter:
    """One parameter of a model under construction. It does not keep the parameter alive.

    State: WHOLE    n elements; a change is kept, for rank 0's values are taken when it is sharded
           SHARDED  n/N elements, `shard`, and a placeholder
           HELD     both: whole for as long as it is read
    A rank that is alone keeps everything WHOLE, unless its shards lie in host memory. Every method is a
    collective, except where it says otherwise.
    """

    def __init__(
        self, param: nn.Parameter, name: str, init: InitContext, owner: nn.Module | None, *, serial: int
    ) -> None:
        """`owner` is the module that has registered it, if that is known; `serial` tells which one of its
        zero.Init it is, on every rank.
        """
        self.name = name
        self.serial = serial
        self.init = init
        self._owners: list[weakref.ref[nn.Module]] = []
        if owner is not None:
            self.note_owner(owner)
        # [ceil(n / N)], the last ranks' with zeros at the end; on the device, or in host memory
        self.shard: Tensor | None = None
        self._param = TensorWeakRef(param)
        self._names: list[TensorWeakRef] = []  # FreedValues, of which some may be gone
        self._placeholder: Placeholder | None = None  # set while the values are away
        self._num_holds = 0
        self._version = 0  # version of the parameter when it came back to be held
        _EARLY[param] = self

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of the parameter among all, the same on every rank, though a rank may have made more
        contexts than others; not a collective.
        """
        return self.init.number, self.serial

    @property
    def param(self) -> nn.Parameter:
        """The parameter; not a collective."""
        param = self._param()
        if not isinstance(param, nn.Parameter):
            raise AssertionError(f"{self.name} is gone")
        return param

    @property
    def is_dead(self) -> bool:
        """True if this rank has dropped the parameter; not a collective."""
        return self._param() is None

    def note_owner(self, module: nn.Module) -> None:
        """Note that this module registers it, too; not a collective."""
        if not self.is_owned_by(module):
            self._owners.append(weakref.ref(module))

    def is_owned_by(self, module: nn.Module) -> bool:
        """Whether this module has registered it; not a collective."""
        return any(owner() is module for owner in self._owners)

    @property
    def owners(self) -> list[nn.Module]:
        """The modules that have registered it, and are here; not a collective."""
        owners = [owner() for owner in self._owners]
        return [owner for owner in owners if owner is not None]

    @property
    def is_replaced(self) -> bool:
        """Whether the modules that have registered it are gone, or have another in its place;
        not a collective.
        """
        params = [one for owner in self.owners for one in owner._parameters.values()]
        return bool(self._owners) and not any(one is self._param() for one in params)

    @property
    def is_lost(self) -> bool:
        """Whether it is sharded, and no module has it, though something else has; not a collective."""
        return not self.is_whole and not self.is_dead and self.is_replaced

    @property
    def is_whole(self) -> bool:
        """Whether its values can be used; not a collective."""
        return self._placeholder is None

    @property
    def is_held(self) -> bool:
        """Whether it is being read, so that it must not go; not a collective."""
        return self._num_holds > 0

    @property
    def is_edited(self) -> bool:
        """Whether a parameter that was brought to be read has been written; not a collective."""
        if self.shard is None:
            return False
        param = self.param
        return (
            param._version != self._version
            or first_difference(self._own_part(param), self._unpadded().to(param.device)) is not None
        )

    @torch.no_grad()
    def keep_shard(self, *, source: int = 0) -> None:
        """Keep this rank's part of the values of rank `source`."""
        param, axis = self.param, self.init.comm.mesh.shard
        self._broadcast(source)
        if self.init.keeps_on_host or not axis.is_alone:
            where = torch.device("cpu") if self.init.keeps_on_host else param.device
            self.shard = torch.zeros(-(-param.numel() // axis.size), dtype=param.dtype, device=where)
            self._unpadded().copy_(self._own_part(param))
        self.init.describe(self)
        self._hide()

    @torch.no_grad()
    def convert(self, dtype: torch.dtype) -> None:
        """Convert the values to this dtype, after `keep_shard`; not a collective."""
        param = self.param
        if self.shard is not None:
            self.shard = self.shard.to(dtype)
        if self.shard is not None and self._placeholder is not None:
            placeholder, self._placeholder = self._placeholder, None
            nothing = torch.empty((), dtype=dtype, device=param.device)
            placeholder.take_away(param, nothing.expand(param.shape))
            self._hide()
        else:
            param.data = param.detach().to(dtype)
        self.init.describe(self)

    @property
    def own_values(self) -> Tensor:
        """This rank's part of the values, 1-D: all of them while it keeps no shard; not a collective."""
        return self.param.detach().view(-1) if self.shard is None else self._unpadded()

    @property
    def why_away(self) -> str:
        """Explain where the values are, and when they can be used; not a collective."""
        return sharded_until("while the module that owns it runs, after initialize()")

    def unshard_for(self, leaves: Iterable[Any], *, is_use: bool) -> None:
        """Bring the values of this parameter, and of the others among `leaves`; see Init.unshard_for."""
        self.init.unshard_for(leaves, is_use=is_use)

    def owner(self) -> InitContext:
        """Return the zero.Init that has made it; not a collective."""
        return self.init

    def note_name(self, values: FreedValues) -> None:
        """Make these values an alias of the parameter's when those are here; not a collective."""
        self._names = [name for name in self._names if name() is not None]
        self._names.append(TensorWeakRef(values))

    def note_copy(self, copy: nn.Parameter) -> None:
        """Shard a copy, too; not a collective."""
        self.init.note(copy, self.name)

    def use(self) -> None:
        """Have the values back, to be used and changed, or those that `set_()` has given it meanwhile."""
        param, placeholder = self.param, self._placeholder
        given = None if placeholder is None else placeholder.take_set(param)
        self._show()
        # A memory of its own: gloo's thread lets go of the gathered one later, as if it had an alias.
        param.data = param.detach().clone() if given is None else given
        self.shard = None
        names, self._names = [name() for name in self._names], []
        for values in names:
            if isinstance(values, FreedValues):
                values.become(self.param.detach())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the values here, to be read."""
        param = self.param  # keeps the parameter alive until the end, on every rank
        self._show()
        self._num_holds += 1
        try:
            yield
        finally:
            self._num_holds -= 1
            if not self.is_held:
                self._hide()
            del param

    def spread(self, rank: int) -> None:
        """Take the values that this rank has written, on all ranks."""
        self._broadcast(rank)
        if self.shard is not None:
            self._unpadded().copy_(self._own_part(self.param))
        self._version = self.param._version

    def take_out(self) -> None:
        """Turn it into a parameter like any other, with all its values."""
        self._show()
        self.shard = None
        self.forget()

    def forget(self) -> None:
        """Leave a parameter that is whole, or dead, alone from now on; not a collective."""
        param = self._param()  # the reference that its zero.Init has may be the last one
        self.init.let_go(self)
        if param is not None:
            detach(param)
            _EARLY.pop(param, None)

    def _show(self) -> None:
        if self._placeholder is None or self.shard is None:
            return
        param, axis = self.param, self.init.comm.mesh.shard
        flat = shard = self.shard.to(self.init.device)
        if not axis.is_alone:
            flat = shard.new_empty(axis.size * shard.numel())
            self.init.comm.all_gather_from(shard, flat, what=f"parameter '{self.name}'").wait()
        placeholder, self._placeholder = self._placeholder, None
        placeholder.take_away(param, flat[: param.numel()].view(param.shape))
        self._version = param._version

    def _hide(self) -> None:
        if self.shard is not None and self.is_whole:
            param = self.param
            self._placeholder = Placeholder(self.name, param, self, dtype=param.dtype, device=param.device)
            self._placeholder.put(param)

    def _broadcast(self, rank: int) -> None:
        param = self.param
        param.data = param.detach().to(self.init.device).contiguous()
        self.init.comm.broadcast(param.detach(), what=f"parameter '{self.name}'", source=rank)

    def _own_part(self, whole: Tensor) -> Tensor:
        start, stop = self._range()
        return whole.detach().reshape(-1)[start:stop]

    def _unpadded(self) -> Tensor:
        if self.shard is None:
            raise AssertionError(f"{self.name} has no shard")
        start, stop = self._range()
        return self.shard[: stop - start]

    def _range(self) -> tuple[int, int]:
        axis, numel = self.init.comm.mesh.shard, self.param.numel()
        size = -(-numel // axis.size)
        return min(axis.index * size, numel), min((axis.index + 1) * size, numel)
