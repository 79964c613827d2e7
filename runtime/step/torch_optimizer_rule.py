"""Any torch optimizer, on this rank's part of the parameters.

The optimizer is given stand-ins for the model's parameters, and steps these. An element-wise optimizer gets
the run of each parameter that the rank's shard holds: nothing is sent, and its states are sharded. Any other
optimizer gets whole parameters in their true shapes, and each rank owns some of them: for the step, gradients
and values are sent to the owners, and then values back; the states stay with the owner. A rank without peers
owns everything. A parameter that is divided over ranks (tensor_parallel) is put together on each of these
ranks, which step the whole of it and keep their parts.

[Note: stepped by parts] Where masters, states or parameters lie elsewhere between steps, one sub-buffer
after the other comes to the device and is stepped there. The optimizer is then called once for each
sub-buffer, with its parameters alone and with the hyper-parameters from before the step; it must step each
parameter by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import Collectives
from ..errors import ConfigError
from ..zero.units.sub_buffer import SubBuffer
from .device_turn import DeviceTurn
from .pipeline import ReadyShard, StepPipeline
from .rule import AfterSubBuffer, ByName, Groups, hyper_parameters
from .stand_in import (
    ShardAtHand,
    StandInOptimizer,
    StandInParam,
    run_of,
    stand_in_of_whole,
    stand_ins_of_shard,
)
from .whole_tensors import WholeTensors, choose_owners

_Shards = dict[SubBuffer, ShardAtHand]
_Shared = tuple[StandInOptimizer, SubBuffer, int]  # a parameter, and the optimizer that sees it whole


class _Exchange:
    """Whole parameters that travel together."""

    def __init__(self, items: Sequence[_Shared], owners: Sequence[int], comm: Collectives) -> None:
        self.whole = WholeTensors([(sub_buffer, index) for _, sub_buffer, index in items], owners, comm)
        self.stand_ins = {number: stand_in_of_whole(*items[number]) for number in self.whole.owned}

    def collect(self, shards: _Shards) -> None:
        """Give the owners' stand-ins values and gradients.

        Order: a collective
        """
        whole = self.whole
        held = [(shards[whole.index(number)[0]], run_of(fragment)) for number, fragment in whole.held]
        values = whole.collect([shard.master[run] for shard, run in held])
        gradients = whole.collect([shard.grads_at(run) for shard, run in held])
        for number, stand_in in self.stand_ins.items():
            stand_in.param.data = stand_in.whole(values.pop(number))
            stand_in.param.grad = stand_in.whole(gradients.pop(number))

    def hand_back(self, shards: _Shards) -> None:
        """Put the new values into the shards.

        Order: a collective
        """
        whole = self.whole
        values = {number: stand_in.own_part() for number, stand_in in self.stand_ins.items()}
        for (number, fragment), piece in zip(whole.held, whole.hand_back(values), strict=True):
            shards[whole.index(number)[0]].master[run_of(fragment)].copy_(piece)
        for stand_in in self.stand_ins.values():
            stand_in.let_go()


class TorchOptimizerRule:
    """Rule that steps these optimizers; they belong to the rule and are used by nothing else."""

    def __init__(self, name: str, optimizers: Sequence[StandInOptimizer]) -> None:
        self.name = name
        self.steps_by_sub_buffer = False
        self.states_may_leave = all(wrapped.is_per_parameter for wrapped in optimizers)
        self.groups_apart = frozenset(
            group for wrapped in optimizers if not wrapped.is_elementwise for group in wrapped.groups
        )
        self._optimizers = tuple(optimizers)
        self._sub_buffers: tuple[SubBuffer, ...] = ()
        self._stand_ins: dict[SubBuffer, list[StandInParam]] = {}
        # the sub-buffers that are stepped together -> what they exchange
        self._exchanges: dict[tuple[SubBuffer, ...], list[_Exchange]] = {}
        self._steps_by_parts = False  # see [Note: stepped by parts]

    def attach(self, sub_buffers: Sequence[SubBuffer], groups: Groups, comm: Collectives) -> None:
        """Make the stand-ins."""
        self._sub_buffers = tuple(sub_buffers)
        self._steps_by_parts = self.states_may_leave and any(map(_is_away, self._sub_buffers))
        optimizer_of = {group: wrapped for wrapped in self._optimizers for group in wrapped.groups}
        shared: list[_Shared] = []
        for sub_buffer in self._sub_buffers:
            self._stand_ins[sub_buffer] = list(stand_ins_of_shard(sub_buffer, optimizer_of))
            shared += self._shared_in(sub_buffer, optimizer_of)
        self._share(shared)
        for sub_buffer, stand_ins in self._stand_ins.items():
            for stand_in in stand_ins:
                if not stand_in.is_elementwise:
                    sub_buffer.optimizer_shard.states_of_whole[stand_in.member_index] = partial(
                        getattr, stand_in, "state"
                    )
        self._list_params(self._sub_buffers)
        self._take_states(optimizer_of)

    def _shared_in(
        self, sub_buffer: SubBuffer, optimizer_of: Mapping[int, StandInOptimizer]
    ) -> Iterator[_Shared]:
        """Yield the parameters of which other ranks have parts, and that an optimizer sees whole."""
        for index, member in enumerate(sub_buffer.members):
            wrapped = optimizer_of[member.group]
            if wrapped.is_elementwise:
                continue
            if sub_buffer.domain.cut_of(member.param) is not None and member.param.ndim > 2:
                raise ConfigError(
                    f"optimizer {self.name} sees whole tensors, and parameter '{member.name}' is a stack "
                    f"of shape {sub_buffer.whole_shape(index)} that is divided over ranks: each rank would "
                    "need memory for all of it; give an optimizer that updates element by element, as AdamW"
                )
            if prod(sub_buffer.whole_shape(index)) and sub_buffer.plan.num_shards > 1:
                yield wrapped, sub_buffer, index

    def _share(self, shared: Sequence[_Shared]) -> None:
        """Choose owners, and make their stand-ins.

        Owners are chosen by the size of the whole parameter, so that they are the same for all its parts.
        """
        by_comm: dict[Collectives, list[_Shared]] = {}
        for item in shared:
            by_comm.setdefault(item[1].comm, []).append(item)
        for comm, items in by_comm.items():
            numels = [prod(sub_buffer.whole_shape(index)) for _, sub_buffer, index in items]
            owners = choose_owners(numels, len(comm.mesh.state_peers))
            for part in self._parts:
                numbers = [number for number, (_, sub_buffer, _) in enumerate(items) if sub_buffer in part]
                if not numbers:
                    continue
                chosen = [items[number] for number in numbers]
                exchange = _Exchange(chosen, [owners[number] for number in numbers], comm)
                self._exchanges.setdefault(part, []).append(exchange)
                for _, sub_buffer, index in chosen:
                    sub_buffer.optimizer_shard.states_of_whole[index] = dict
                for stand_in in exchange.stand_ins.values():
                    self._stand_ins[stand_in.sub_buffer].append(stand_in)

    @property
    def _parts(self) -> Sequence[tuple[SubBuffer, ...]]:
        """The sub-buffers that are stepped together; see [Note: stepped by parts]."""
        if self._steps_by_parts:
            return [(sub_buffer,) for sub_buffer in self._sub_buffers]
        return [self._sub_buffers]

    @torch.no_grad()
    def _take_states(self, optimizer_of: Mapping[int, StandInOptimizer]) -> None:
        """Take over states that the optimizers already have: some make them at construction."""
        if not any(wrapped.states for wrapped in self._optimizers):
            return
        beside: ByName = {}
        for sub_buffer in self._sub_buffers:
            with _here(sub_buffer, is_written=True):
                for index, member in enumerate(sub_buffer.members):
                    states = optimizer_of[member.group].states.get(member.param, {})
                    for name, value in states.items():
                        if optimizer_of[member.group].is_elementwise and _is_by_element(
                            name, value, member.param
                        ):
                            kept = sub_buffer.optimizer_shard.states
                            if name not in kept:
                                kept[name] = sub_buffer.optimizer_shard.make_state()
                            sub_buffer.copy_fragment(index, value, kept[name])
                        else:
                            beside.setdefault(sub_buffer.true_name(index), {})[name] = (
                                value.clone() if isinstance(value, Tensor) else value
                            )
        self.load_beside(beside)
        for wrapped in self._optimizers:
            wrapped.states.clear()  # whole tensors, on every rank

    # ---- a step

    def step(
        self, groups: Groups, *, step: int, grad_scale: float, after_sub_buffer: AfterSubBuffer | None
    ) -> None:
        """Step all parameters at once, because each optimizer counts its steps in its own way; or part by
        part, see [Note: stepped by parts].
        """
        before = [hyper_parameters(group) for group in groups]
        if self._steps_by_parts:

            def step_part(ready: ReadyShard) -> None:
                part = (ready.sub_buffer,)
                self._list_params(part)
                self._step(part, {ready.sub_buffer: ShardAtHand(ready, grad_scale)}, before)
                for stand_in in self._stand_ins[ready.sub_buffer]:
                    stand_in.let_go()

            pipeline = StepPipeline(self._sub_buffers, kind=DeviceTurn)
            pipeline.run(step_part, after_sub_buffer=after_sub_buffer)
        else:
            shards = {
                sub_buffer: ShardAtHand(_in_place(sub_buffer), grad_scale) for sub_buffer in self._sub_buffers
            }
            self._step(self._sub_buffers, shards, before)
            if after_sub_buffer is not None:
                for sub_buffer in self._sub_buffers:
                    after_sub_buffer(sub_buffer)
        for wrapped in self._optimizers:  # an optimizer may change its hyper-parameters
            for own, index in zip(wrapped.optimizer.param_groups, wrapped.groups, strict=True):
                groups[index].update(hyper_parameters(own))

    def _step(self, part: tuple[SubBuffer, ...], shards: _Shards, groups: Groups) -> None:
        """Step these sub-buffers, with the hyper-parameters of these groups."""
        stand_ins = [stand_in for sub_buffer in part for stand_in in self._stand_ins[sub_buffer]]
        exchanges = self._exchanges.get(part, [])
        for stand_in in stand_ins:
            if stand_in.run is not None:
                stand_in.take(stand_in.run, shards[stand_in.sub_buffer])
        for exchange in exchanges:
            exchange.collect(shards)
        for stand_in in stand_ins:  # torch's optimizers leave alone what has no gradient
            if stand_in.member_index in stand_in.sub_buffer.optimizer_shard.frozen:
                stand_in.param.grad = None
        self._call_optimizers(groups)
        for exchange in exchanges:
            exchange.hand_back(shards)
        for stand_in in stand_ins:
            stand_in.give_back(shards[stand_in.sub_buffer])
        for sub_buffer, shard in shards.items():
            if shard.ready.param_out is not None:
                with nullcontext() if self._steps_by_parts else _here(sub_buffer, is_written=True):
                    shard.ready.param_out.copy_(shard.master)

    def _call_optimizers(self, groups: Groups) -> None:
        for wrapped in self._optimizers:
            for own, index in zip(wrapped.optimizer.param_groups, wrapped.groups, strict=True):
                own.update(groups[index])
            with torch.enable_grad():  # as in a training loop; an optimizer switches it off by itself
                wrapped.optimizer.step()

    def _list_params(self, part: tuple[SubBuffer, ...]) -> None:
        """Let the optimizers' groups have the stand-ins of these sub-buffers, and no others."""
        listed: dict[int, list[Tensor]] = {}
        for sub_buffer in part:
            for stand_in in self._stand_ins[sub_buffer]:
                listed.setdefault(stand_in.group, []).append(stand_in.param)
        for wrapped in self._optimizers:
            for own, index in zip(wrapped.optimizer.param_groups, wrapped.groups, strict=True):
                own["params"] = listed.get(index, [])

    # ---- what is remembered

    def reset_states(self, names: Sequence[str]) -> None:
        """Let the optimizers begin anew, the elements' states with zeros."""
        for wrapped in self._optimizers:
            wrapped.optimizer.state.clear()
        for sub_buffer in self._sub_buffers:
            sub_buffer.allocate_states(names)
            for stand_in in self._stand_ins[sub_buffer]:
                stand_in.kept = set()

    def beside(self) -> ByName:
        """Return all states that are not sharded by element: numbers, and the states of whole parameters."""
        values: ByName = {}
        for sub_buffer, stand_ins in self._stand_ins.items():
            with _here(sub_buffer, is_written=False):
                for stand_in in stand_ins:
                    kept = set(sub_buffer.optimizer_shard.states) if stand_in.is_elementwise else set()
                    values[stand_in.name] = {
                        name: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
                        for name, value in stand_in.state.items()
                        if name not in kept
                    }
        return values

    def load_beside(self, saved: ByName) -> None:
        """Take saved state over. The optimizer makes the other parameters' states at the first step."""
        for sub_buffer, stand_ins in self._stand_ins.items():
            with _here(sub_buffer, is_written=True):
                for stand_in in stand_ins:
                    state = {
                        name: stand_in.placed(name, value)
                        for name, value in saved.get(stand_in.name, {}).items()
                    }
                    kept = set(sub_buffer.optimizer_shard.states) if stand_in.is_elementwise else set()
                    if state or kept:
                        stand_in.wrapped.optimizer.state[stand_in.param] = state
                        stand_in.kept = kept


def _is_away(sub_buffer: SubBuffer) -> bool:
    """Tell whether values of the sub-buffer lie outside the memory where the optimizer steps."""
    residence = sub_buffer.residence
    return residence.states.is_away or residence.parameters.is_away


def _here(sub_buffer: SubBuffer, *, is_written: bool) -> Any:
    """Have values that lie on a disk in memory inside."""
    shards = sub_buffer.optimizer_shard, sub_buffer.param_shard
    if all(shard.spill is None for shard in shards):
        return nullcontext()
    return sub_buffer.here(is_written=is_written)


def _in_place(sub_buffer: SubBuffer) -> ReadyShard:
    shard, own = sub_buffer.optimizer_shard, sub_buffer.param_shard.own
    return ReadyShard(
        sub_buffer=sub_buffer,
        master=shard.master,
        states=shard.states,
        grads=tuple(sub_buffer.gradients.pieces(0, own.numel())),
        param_out=own if shard.has_separate_master else None,
    )


def _is_by_element(name: str, value: Any, param: Tensor) -> bool:
    return name != "step" and isinstance(value, Tensor) and value.shape == param.shape
