"""A sub-buffer's way through the step of an optimizer that computes on the device wherever states lie.

Such an optimizer takes the same operations on the same values as if nothing were offloaded, so the bits are
the same. Master, states and gradients come to the device for it and go back: those of the next sub-buffer
come while this one is stepped, and those of the one before go.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..offload.device_copies import Arrival, bring
from ..offload.pinned_memory import host_empty
from ..zero.units.sub_buffer import SubBuffer
from .pipeline import ReadyShard, Turn


class DeviceTurn(Turn):
    """Turn of a sub-buffer that is stepped on the device."""

    def __init__(self, sub_buffer: SubBuffer) -> None:
        super().__init__(sub_buffer)
        self._is_apart = sub_buffer.residence.steps_on_host
        self._ready: ReadyShard | None = None
        self._states_of_whole: dict[str, Tensor] = {}  # on the device, by `whole_states`' names
        self._at_rest: dict[str, Tensor] = {}  # the same states where they lie between steps
        self._under_way: list[Arrival] = []

    def start(self) -> None:
        """Begin to read the sub-buffer's values, and to copy to the device what is in host memory."""
        if self._has_started:
            return
        self._has_started = True
        self.sub_buffer.start_in()
        self.sub_buffer.gradients.start_in()
        if not self._is_spilled:
            self._ready = self._bring_all()

    @property
    def _is_spilled(self) -> bool:
        shards = self.sub_buffer.optimizer_shard, self.sub_buffer.param_shard
        return any(shard.spill is not None for shard in shards)

    def arrive(self) -> ReadyShard:
        """Have the shard and the states of whole members on the device."""
        self.sub_buffer.finish_in()
        if self._ready is None:
            self._ready = self._bring_all()
        for arrival in self._under_way:
            arrival.wait_on_device()
        if self._is_apart:
            for label, states, name, _ in list(self.sub_buffer.optimizer_shard.whole_states()):
                states[name] = self._states_of_whole.pop(label)
        return self._ready

    def publish(self) -> None:
        """Bring new parameters to where they are kept, and let the rest go where it lies between steps."""
        sub_buffer, ready = self.sub_buffer, self._ready
        shard = sub_buffer.optimizer_shard
        if ready is None:
            raise AssertionError(f"{sub_buffer.label} has not come to the device")
        if self._is_apart:
            self._send(ready.master, shard.master)
            for name, state in ready.states.items():
                shard.states[name] = self._send(state, shard.states.get(name))
            for label, states, name, value in list(shard.whole_states()):
                states[name] = self._send(value, self._at_rest.get(label))
        if ready.param_out is not None and ready.param_out is not sub_buffer.param_shard.own:
            bring(ready.param_out, sub_buffer.param_shard.own)
        if self._is_spilled or not shard.has_separate_master:
            self._land()  # what comes next reads host memory
        self._ready, self._at_rest = None, {}
        sub_buffer.gradients.let_go()
        sub_buffer.start_out()

    def end(self) -> None:
        """Wait until everything is where it lies between steps."""
        self._land()
        super().end()

    def _bring_all(self) -> ReadyShard:
        sub_buffer, shard = self.sub_buffer, self.sub_buffer.optimizer_shard
        master, states = shard.master, shard.states
        grads = tuple(self._pieces())
        if self._is_apart:
            master = self._bring(master)
            states = {name: self._bring(state) for name, state in states.items()}
            self._at_rest = {label: value for label, _, _, value in shard.whole_states()}
            self._states_of_whole = {label: self._bring(value) for label, value in self._at_rest.items()}
            if sub_buffer.gradients.is_on_host:
                grads = tuple((offset, self._bring(grad)) for offset, grad in grads)
        param_out = sub_buffer.param_shard.own if shard.has_separate_master else None
        if param_out is not None and sub_buffer.residence.params_on_host:
            param_out = torch.empty_like(param_out, device=sub_buffer.device)
        return ReadyShard(
            sub_buffer=sub_buffer, master=master, states=states, grads=grads, param_out=param_out
        )

    def _bring(self, source: Tensor) -> Tensor:
        target = torch.empty_like(source, device=self.sub_buffer.device)
        self._under_way.append(Arrival(source, target))
        return target

    def _send(self, value: Tensor, target: Tensor | None) -> Tensor:
        """Begin to copy a value to where it lies between steps, and return that."""
        if target is None or (target.shape, target.dtype) != (value.shape, value.dtype):
            pin_memory = self.sub_buffer.residence.pins_states
            target = host_empty(value.shape, value.dtype, pin_memory=pin_memory)
        self._under_way.append(Arrival(value.detach(), target))
        return target

    def _land(self) -> None:
        arrivals, self._under_way = self._under_way, []
        for arrival in arrivals:
            arrival.wait()
