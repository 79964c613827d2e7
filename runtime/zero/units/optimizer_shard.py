"""The optimizer's memory for one sub-buffer: this rank's shard of the float32 masters and of the states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...offload.offload import Offload
from ...offload.pinned_memory import host_zeros
from ...offload.spill import Spill
from ...optimizers.eight_bits import CODES, SCALES, decode, encode, num_scales
from ..parameters.param_shard import ParamShard
from ..parameters.sub_buffer_plan import SubBufferPlan


class PendingUpdate(Protocol):
    """A sub-buffer's update that was made before the step, or beside it."""

    def publish(self) -> None:
        """Let its results be the sub-buffer's."""

    def drop(self) -> None:
        """Drop the update, so that it has no effect."""


class OptimizerShard:
    """Masters and states of trained parameters; nothing of frozen ones."""

    def __init__(
        self, plan: SubBufferPlan, params: ParamShard, master: Tensor | None, offload: Offload
    ) -> None:
        """`master` is [shard] of the plan's dtype of masters; None: the parameters are their own master."""
        self._plan, self._params, self._master = plan, params, master
        # [shard] of the precision's dtype by name, beside the master, and the scales of those that are codes;
        # `value_of` has their values
        self.states: dict[str, Tensor] = {}
        # index -> states by name, of members that the optimizer sees whole;
        # empty on ranks that do not own the member
        self.states_of_whole: dict[int, Callable[[], dict[str, Any]]] = {}
        self.spill: Spill | None = offload.make_spill(
            plan.residence.states, self._stored, what=f"states of {plan.label}"
        )
        # indices of members that the coming step leaves alone, and how many steps have done so before
        self.frozen: frozenset[int] = frozenset()
        self.missed: dict[int, int] = {}
        self.pending_update: PendingUpdate | None = None

    @property
    def master(self) -> Tensor:
        """[shard] What the optimizer updates; parameters of the same dtype in the same memory are their own
        master.
        """
        return self._params.own if self._master is None else self._master

    @property
    def has_separate_master(self) -> bool:
        """Whether the master is a copy that must be rounded into the parameters, or brought to them."""
        return self._master is not None

    def make_param_out(self) -> Tensor | None:
        """Return memory, [shard], for the rounded parameters where the optimizer steps;
        None if the master is the parameter.
        """
        if not self.has_separate_master:
            return None
        own = self._params.own
        # The step writes segments only: neither padding nor what it leaves alone.
        out = self._zeros(own.dtype)
        return out.copy_(own) if self.frozen else out

    def allocate_states(self, names: Sequence[str]) -> None:
        """Have zeros in the states of these names, and no other; what lies on a disk must be here."""
        self.states = {}  # the memory of those from before is free for the new ones
        self.states = {name: self.make_state() for name in names}
        if self._plan.precision.states == CODES:
            scales = num_scales(self.master.numel())
            self.states |= {name + SCALES: self._zeros(torch.float32, scales) for name in names}

    def make_state(self) -> Tensor:
        """Return zeros, [shard], for one more state."""
        return self._zeros(self._plan.precision.states)

    def whole_states(self) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
        """Yield each tensor among the states of members that the optimizer sees whole: a name for it, the
        states that it belongs to, and its name and value there. Single numbers stay where the optimizer has
        them.
        """
        for index, states in self.states_of_whole.items():
            own = states()
            for name, value in own.items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    yield f"{index}.{name}", own, name, value

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the states that have a value for each element."""
        return tuple(name for name in self.states if not name.endswith(SCALES))

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of `value_of` the state."""
        dtype = self.states[name].dtype
        return torch.float32 if dtype == CODES else dtype

    def value_of(self, name: str) -> Tensor:
        """Return a state: [shard] as it lies here, or float32 values that were decoded from it."""
        state = self.states[name]
        return decode(state, self.states[name + SCALES], name) if state.dtype == CODES else state

    def set_value(self, name: str, values: Tensor) -> None:
        """Take over what was written to `value_of` the state, where that is a copy.

        Codes whose values were not changed stay as they are.
        """
        state = self.states[name]
        if state.dtype == CODES:
            codes, scales = encode(values, name, None)
            state.copy_(codes)
            self.states[name + SCALES].copy_(scales)

    def _zeros(self, dtype: torch.dtype, numel: int | None = None) -> Tensor:
        """[shard] or [numel] Where the master is."""
        master = self.master
        numel = master.numel() if numel is None else numel
        if master.device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=master.device)
        return host_zeros(torch.Size((numel,)), dtype, pin_memory=self._plan.residence.pins_states)

    def refresh_master(self, *, keeps_rest: bool = False) -> None:
        """Take the parameters' values into the master, if it is a copy; what lies on a disk must be here.

        `keeps_rest`: elements that are equal but for the rounding keep the bits that the
        parameter has no room for.
        """
        if self._master is None:
            return
        new = self._params.own
        if keeps_rest:
            new = new.to(self._master.device)
            is_new = new != self._master.to(new.dtype)
            self._master.copy_(torch.where(is_new, new.float(), self._master))
        else:
            self._master.copy_(new)

    def held(self) -> tuple[Tensor, ...]:
        """Tensors that have memory of their own, wherever it lies."""
        return tuple(self._stored().values())

    def release(self) -> None:
        """Free the master and the states."""
        self.states, self.states_of_whole = {}, {}
        self._master, self.spill = None, None

    def _stored(self) -> dict[str, Tensor]:
        whole = {label: value for label, _, _, value in self.whole_states()}
        masters = {} if self._master is None else {"master": self._master}
        return {**masters, **self.states, **whole}
