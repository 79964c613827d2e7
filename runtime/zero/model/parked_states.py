"""States of a model that were moved to host memory for a while, between steps: their own memory is given up,
and taken again later.

A storage goes as it is, and comes back into the same object. So every view of it, the users' parameters among
them, is the same tensor afterwards, and no other object has to learn where anything lies. Meanwhile whatever
leads to such a view is barred: parameters are placeholders, `p.grad` is None, and the engine refuses what
needs the rest. All of this is the same without an accelerator, where the bytes only go from one place in host
memory to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from ...errors import CheckpointError, ConfigError
from ...offload.device_copies import Arrival
from ...offload.pinned_memory import host_empty
from ..units.sub_buffer import SubBuffer
from .offload_kinds import OffloadStateTypeEnum as Kind

KINDS = tuple(Kind)


def read_kinds(include: Iterable[Kind | str] | None) -> tuple[Kind, ...]:
    """Return the states that are named, by text or enum; None names all.

    Errors: ConfigError for a name that is none of them
    """
    if include is None:
        return KINDS
    known = [kind.value for kind in KINDS]
    wrong = [name for name in include if name not in known]
    if wrong or isinstance(include, str):
        raise ConfigError(
            f"offload_states(include={include!r}): must be a list of states, which are {', '.join(known)}"
        )
    return tuple(kind for kind in KINDS if kind in set(include))


class ParkedStorage:
    """One storage, with its bytes in host memory."""

    def __init__(self, tensor: Tensor, *, pin_memory: bool, non_blocking: bool) -> None:
        self._tensor = tensor
        own = _bytes(tensor)
        self._host = host_empty(own.shape, torch.uint8, pin_memory=pin_memory and tensor.is_cuda)
        _copy(own, self._host, non_blocking=non_blocking)
        # The device's allocator may give this memory away at once: its next use comes later
        # in the same stream.
        tensor.untyped_storage().resize_(0)

    def let_go(self) -> None:
        """Give the memory up again; the bytes are still here."""
        self._tensor.untyped_storage().resize_(0)

    def restore(self, *, non_blocking: bool) -> None:
        """Take the memory again, and the bytes."""
        self._tensor.untyped_storage().resize_(self._host.numel())
        _copy(self._host, _bytes(self._tensor), non_blocking=non_blocking)


class ParkedStates:
    """Parked states of these sub-buffers, by kind. All ranks may park on their own: nothing is sent."""

    def __init__(self, sub_buffers: Sequence[SubBuffer]) -> None:
        self._sub_buffers = tuple(sub_buffers)
        self._parked: dict[Kind, list[ParkedStorage]] = {}
        self.barred: str | None = None  # why nothing here may be used: a load has ended in the middle
        # parameters that were made on the meta device, by their names in the whole model, until a load
        self.valueless: frozenset[str] = frozenset()
        self.is_given_up = False  # the engine has ended
        self.is_taken = False  # another engine has the parameters
        self.is_lost = False  # the engine that took them was never finished
        self.taken_out_by: str | None = None  # the call that has made the parameters plain again

    def note_valueless(self, names: Iterable[str]) -> None:
        """Bar all use until a load has given values to these parameters."""
        self.valueless = frozenset(names)
        if self.valueless:
            self.barred = (
                f"'{min(self.valueless)}' was made on the meta device and has no values yet; call "
                "engine.load_weights() or engine.load_checkpoint() first"
            )

    def note_load(self) -> None:
        """Lift the bar: all values are of one state."""
        self.valueless, self.barred = frozenset(), None

    @property
    def is_over(self) -> bool:
        """Whether no parameter is this engine's any more, and those that no other has are plain."""
        return self.is_taken and not self.is_lost

    def check_kept(self, what: str) -> None:
        """Refuse `what`, which needs gradients, masters or states, where they are gone.

        Errors: ConfigError if the engine has given them up, or another one has the parameters
        """
        self._check_not_taken(what)
        if self.is_given_up:
            raise ConfigError(
                f"{what} came after engine.destroy(), which gives up gradients and optimizer states; call "
                "it before, or go on with a new engine of initialize()"
            )

    def check_here(self, what: str, kinds: Sequence[Kind] = KINDS, *, is_load: bool = False) -> None:
        """Refuse `what`, which needs these kinds, where they are away. `is_load`: it replaces all of them.

        Errors: ConfigError if one of them is in host memory, or another engine has the parameters;
                CheckpointError if they are of no one state
        """
        self._check_not_taken(what)
        if self.barred is not None and not is_load:
            raise CheckpointError(f"{what} cannot go on: {self.barred}")
        missing = [kind.value for kind in kinds if kind in self._parked]
        if missing:
            raise ConfigError(
                f"{what} needs {', '.join(missing)}, which engine.offload_states() has moved to host memory; "
                "call engine.reload_states() first"
            )

    def _check_not_taken(self, what: str) -> None:
        if self.is_lost:
            raise ConfigError(
                f"{what} came after another initialize() had taken over parameters of this engine, and "
                "failed: what this engine had of them is lost; call initialize() once more, and load a "
                "checkpoint"
            )
        if self.taken_out_by is not None:
            raise ConfigError(
                f"{what} came after {self.taken_out_by} had given the engine's module the weights of a "
                "checkpoint, as plain parameters: give the module to initialize() again to train it, or use "
                "engine.load_checkpoint(), with which the engine goes on"
            )
        if self.is_taken:
            raise ConfigError(
                f"{what} came after parameters of this engine were given to another initialize(), which "
                "trains them since: a parameter has one engine; use that one, or give initialize() a copy "
                "of the model, made by copy.deepcopy()"
            )

    @torch.no_grad()
    def move_out(self, kinds: Sequence[Kind], *, pin_memory: bool, non_blocking: bool) -> None:
        """Park all of these kinds or none; those that are parked already stay so.

        No sharded parameter may be unsharded.
        """
        wanted = [kind for kind in kinds if kind not in self._parked]
        try:
            for kind in wanted:
                parked = self._parked[kind] = []
                for tensor in self._memories(kind):
                    parked.append(ParkedStorage(tensor, pin_memory=pin_memory, non_blocking=non_blocking))
        except BaseException:  # host memory is used up
            begun = {kind: self._parked.pop(kind) for kind in wanted if kind in self._parked}
            self._restore(begun, non_blocking=False)
            raise

    @torch.no_grad()
    def move_in(self, *, non_blocking: bool) -> None:
        """Bring all parked states back; where that fails, none of them."""
        self._restore(self._parked, non_blocking=non_blocking)
        self._parked = {}

    def _restore(self, parked: Mapping[Kind, Sequence[ParkedStorage]], *, non_blocking: bool) -> None:
        with ExitStack() as undo:  # the device may be full
            for storage in (storage for of_kind in parked.values() for storage in of_kind):
                undo.callback(storage.let_go)
                storage.restore(non_blocking=non_blocking)
            undo.pop_all()
        for sub_buffer in self._sub_buffers:
            if Kind.lp_params in parked and not sub_buffer.is_sharded and sub_buffer.param_shard.is_covered:
                sub_buffer.param_shard.show()
            if Kind.lp_grads in parked and sub_buffer.is_trained and not sub_buffer.gradients.is_here:
                sub_buffer.gradients.put_on()

    def _memories(self, kind: Kind) -> Iterator[Tensor]:
        """Yield the memory of this kind of state, one tensor for each storage; no `p.grad` or parameter leads
        there any more.
        """
        for sub_buffer in self._sub_buffers:
            seen: set[int] = set()
            for tensor in _holders(sub_buffer, kind):
                storage = tensor.untyped_storage()
                is_new = storage._cdata not in seen and storage.nbytes() > 0
                if is_new and tensor.device == sub_buffer.device:
                    seen.add(storage._cdata)
                    yield tensor


def _holders(sub_buffer: SubBuffer, kind: Kind) -> Sequence[Tensor]:
    if kind is Kind.lp_params:
        if sub_buffer.residence.parameters.is_away:
            return ()
        if not sub_buffer.is_sharded:
            sub_buffer.param_shard.cover()
        return (sub_buffer.param_shard.own,)
    if not sub_buffer.is_trained or (
        kind in (Kind.hp_params, Kind.optim_states) and sub_buffer.residence.states.is_away
    ):
        return ()  # frozen, or away at any time
    if kind is Kind.hp_params:
        return (sub_buffer.optimizer_shard.master,) if sub_buffer.optimizer_shard.has_separate_master else ()
    if kind is Kind.lp_grads:
        return sub_buffer.gradients.take_off()
    if kind is Kind.optim_states:
        whole = [
            state
            for states in sub_buffer.optimizer_shard.states_of_whole.values()
            for state in states().values()
        ]
        return (
            *sub_buffer.optimizer_shard.states.values(),
            *(state for state in whole if isinstance(state, Tensor)),
        )
    return ()


def _copy(source: Tensor, target: Tensor, *, non_blocking: bool) -> None:
    if non_blocking:
        Arrival(source, target).wait_on_device()
    else:
        target.copy_(source)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the whole storage behind the tensor, as bytes."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())
