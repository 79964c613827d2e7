"""A unit: the parameters that are gathered, reduced and stepped together,
as one `SubBuffer` per (dtype, is_trained).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _modes, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from ...comm.pending import Pending
from .sub_buffer import SubBuffer

_OF_CHECKPOINTS = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)


class UnitState(Enum):
    """Place of a unit's parameters, and its cost for this rank. n = the unit's elements, N = ranks per shard
    axis.
    """

    FREED = "freed"  # n/N elements: the shard; each parameter is a placeholder of its true shape
    GATHERING = "gathering"  # n/N + n elements: allocated and being filled; not to be read yet
    # n/N + n elements: the values can be read where they lie; parameters are placeholders still
    GATHERED = "gathered"
    # n/N + n elements: parameters are placeholders again; the values wait for another block of the program
    KEPT = "kept"
    LIVE = "live"  # n/N + n elements: every parameter can be used; n where nothing is sharded


class Unit:
    """Parameters that are unsharded together, and their state.

    `modules` are those whose forward uses them.
    """

    def __init__(self, name: str, sub_buffers: Sequence[SubBuffer], modules: Sequence[nn.Module]) -> None:
        self.name = name
        self.sub_buffers = tuple(sub_buffers)
        self.modules = tuple(modules)
        self._sharded = tuple(sub_buffer for sub_buffer in sub_buffers if sub_buffer.is_sharded)
        self.reshard_after_forward = any(
            sub_buffer.plan.policy.reshard_after_forward for sub_buffer in self._sharded
        )
        self._has_silent = any(sub_buffer.param_shard.has_silent for sub_buffer in self._sharded)
        self.state = UnitState.FREED if self._sharded else UnitState.LIVE
        for sub_buffer in self._sharded:
            sub_buffer.param_shard.on_use = self._use
        self.on_use: Callable[[], None] = self.show  # called when a placeholder is about to be used
        self.on_unshard: Callable[[Unit], None] = _nothing  # called when it is about to be unsharded
        self._gathers: list[Pending] = []
        self._referred_to: list[SubBuffer] = []  # freed, but for the memory, in which the program has tensors
        self.num_gathers = 0
        self.num_forwards = 0  # forwards of its modules that are under way

    @property
    def is_sharded(self) -> bool:
        """True if any part of the unit is sharded, so that there is something to gather."""
        return bool(self._sharded)

    def start_unshard(self) -> None:
        """Begin to gather the values, unless they are here or that has been begun.

        Order: a collective
        """
        self.drop_kept()
        if self.state is UnitState.FREED:
            self.on_unshard(self)
            with _outside_program():
                self._gathers = [sub_buffer.param_shard.start_unshard() for sub_buffer in self._sharded]
            self.state = UnitState.GATHERING
            self.num_gathers += 1

    def start_read(self) -> None:
        """Begin to read values that lie on a disk and will be gathered next."""
        if self.state is UnitState.FREED:
            for sub_buffer in self._sharded:
                sub_buffer.param_shard.start_read()

    def keep(self) -> None:
        """Keep the values for another block of the program, while parameters are placeholders."""
        if self.state is UnitState.LIVE and self._sharded:
            with _outside_program():
                for sub_buffer in self._sharded:
                    sub_buffer.cover()
            self.state = UnitState.KEPT

    def take_kept(self) -> None:
        """Have the values that were kept."""
        self.state = UnitState.GATHERED
        self.on_unshard(self)

    def drop_kept(self) -> None:
        """Give back the memory of values that are kept."""
        if self.state is UnitState.KEPT:
            self.reshard()

    @property
    def is_away(self) -> bool:
        """True if a use of the unit has to gather it."""
        return self.state is UnitState.FREED or self.state is UnitState.KEPT

    @property
    def is_here(self) -> bool:
        """True if the unit's values can be read where they lie."""
        return self.state is UnitState.LIVE or self.state is UnitState.GATHERED

    def wait_for_values(self) -> None:
        """Gather the values and wait until they are here.

        Order: a collective
        """
        self.start_unshard()
        if self.state is UnitState.GATHERING:
            self._finish_unshard()
            self.state = UnitState.GATHERED
            if self._has_silent:
                self.show()

    def wait_for_unshard(self) -> None:
        """Unshard the unit: gather the values, wait for them, and let the parameters have them.

        Order:  a collective
        Errors: ConfigError if a freed parameter has been written to
        """
        self.wait_for_values()
        self.show()

    def show(self) -> None:
        """Let the parameters have their values, if those are here and they have not.

        Errors: as wait_for_unshard
        """
        if self.state is UnitState.GATHERED:
            self.state = UnitState.LIVE
            with _outside_program():
                for sub_buffer in self._sharded:
                    sub_buffer.param_shard.show()

    def _use(self) -> None:
        self.on_use()

    def reshard(self) -> None:
        """Keep this rank's shards only; there is no effect where no parameter is sharded."""
        if self.state is UnitState.FREED:
            self._referred_to = [
                sub_buffer
                for sub_buffer in self._referred_to
                if not sub_buffer.param_shard.values.free_unless_referred_to()
            ]
        if not self._sharded or self.state is UnitState.FREED:
            return
        self._finish_unshard()
        self._referred_to = []
        with _outside_program():
            for sub_buffer in self._sharded:
                if self.state is UnitState.GATHERING:  # gathered for nothing
                    sub_buffer.param_shard.values.free()
                elif not sub_buffer.hide():
                    self._referred_to.append(sub_buffer)
        self.state = UnitState.FREED

    def take_part(self) -> None:
        """Take part in a gather of the values for other ranks; here they are afterwards if they were before.

        Order: a collective
        """
        if self.state is UnitState.FREED:
            self.wait_for_values()
            self.reshard()
            return
        self.wait_for_values()
        with _outside_program():
            for sub_buffer in self._sharded:
                sub_buffer.param_shard.gather_copy()

    @property
    def is_resharded(self) -> bool:
        """Whether `reshard` has nothing to do."""
        return self.state is UnitState.FREED and not self._referred_to

    @property
    def is_referred_to(self) -> bool:
        """Whether it is freed but for memory in which the program has tensors."""
        return self.state is UnitState.FREED and bool(self._referred_to)

    def _finish_unshard(self) -> None:
        with _outside_program():
            for gather in self._gathers:
                gather.wait()
        self._gathers = []


def _outside_program() -> AbstractContextManager[Any]:
    """Return a context in which what is done is not the program's: torch.func does not wrap it, since it
    wraps the views of any tensor, and a wrapper has no memory to send; a selective checkpoint neither counts
    it nor answers with what it has saved.
    """
    guard: AbstractContextManager[Any] = torch._C._DisableFuncTorch()
    return _outside_checkpoints(guard) if torch._C._len_torch_dispatch_stack() else guard


@contextmanager
def _outside_checkpoints(guard: AbstractContextManager[Any]) -> Iterator[None]:
    """Leave other modes where they are: they count, watch or plan what the engine does, too."""
    first = next((place for place, mode in enumerate(_modes()) if isinstance(mode, _OF_CHECKPOINTS)), None)
    popped = [] if first is None else [_pop_mode() for _ in _modes()[first:]][::-1]
    others = [mode for mode in popped if not isinstance(mode, _OF_CHECKPOINTS)]
    for mode in others:
        _push_mode(mode)
    try:
        with guard:
            yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in popped:
            _push_mode(mode)


def _nothing(unit: Unit) -> None:
    """Do nothing, for a unit that no prefetcher has."""
