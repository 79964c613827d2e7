"""Any torch optimizer, on this rank's part of the parameters.

The optimizer is given stand-ins for the model's parameters, and steps these. An element-wise optimizer gets
the run of each parameter that the rank's shard holds: nothing is sent, and its states are sharded. Any other
optimizer gets whole parameters in their true shapes, and each rank owns some of them: for the step, gradients
and values are sent to the owners, and then values back; the states stay with the owner. A rank without peers
owns everything.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm.collectives import Collectives
from ..errors import ConfigError
from ..zero.parameters.layout import Fragment
from ..zero.units.sub_buffer import SubBuffer
from .rule import AfterSubBuffer, ByName, Groups, hyper_parameters, scaled_grad
from .whole_tensors import WholeTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class StandInOptimizer:
    """A copied optimizer, which may be changed, and the user's parameter groups that its groups stand for."""

    optimizer: torch.optim.Optimizer
    states: MutableMapping[
        Tensor, Any
    ]  # states that it remembers already, by the model's parameters; taken over, and emptied
    groups: tuple[int, ...]
    is_elementwise: bool  # the optimizer treats every element alone
    as_matrices: bool = False  # the optimizer takes only matrices: all dimensions but the first are merged


class _StandIn(NamedTuple):
    """Stand-in of the optimizer for the parameter at `member_index` of `sub_buffer`."""

    wrapped: StandInOptimizer
    sub_buffer: SubBuffer
    member_index: int
    param: nn.Parameter
    # elements of the shard; None: a whole parameter, whose values are sent here for the step only
    run: slice | None

    @property
    def name(self) -> str:
        return self.sub_buffer.true_name(self.member_index)

    @property
    def state(self) -> dict[str, Any]:
        """State of the parameter in the optimizer, once it has stepped."""
        state: dict[str, Any] = self.wrapped.optimizer.state.get(self.param, {})
        return state


class TorchOptimizerRule:
    """Rule that steps these optimizers; they belong to the rule and are used by nothing else."""

    def __init__(self, name: str, optimizers: Sequence[StandInOptimizer]) -> None:
        self.name = name
        self.steps_by_sub_buffer = False
        self._optimizers = tuple(optimizers)
        self._sub_buffers: tuple[SubBuffer, ...] = ()
        self._stand_ins: list[_StandIn] = []
        self._shared: list[_StandIn | None] = []  # number in `_whole` -> stand-in; None: another rank owns it
        self._whole: WholeTensors | None = None

    def attach(self, sub_buffers: Sequence[SubBuffer], groups: Groups, comm: Collectives) -> None:
        """Make the stand-ins."""
        self._sub_buffers = tuple(sub_buffers)
        optimizer_of = {group: wrapped for wrapped in self._optimizers for group in wrapped.groups}
        shared: list[tuple[StandInOptimizer, SubBuffer, int]] = []
        for sub_buffer in self._sub_buffers:
            for index, member in enumerate(sub_buffer.members):
                wrapped = optimizer_of[member.group]
                if not wrapped.is_elementwise and sub_buffer.domain.parts is not None:
                    raise ConfigError(
                        f"optimizer {self.name} sees whole tensors, and parameter '{member.name}' is divided "
                        "over ranks (tensor_parallel): that is not available in this version; give an "
                        "optimizer that updates element by element, as AdamW"
                    )
                if not member.param.numel():
                    continue
                if wrapped.is_elementwise or sub_buffer.plan.num_shards == 1:
                    self._stand_ins += _local(wrapped, sub_buffer, index)
                else:
                    shared.append((wrapped, sub_buffer, index))
            self._stand_ins += self._empty(sub_buffer, optimizer_of)
        if shared:
            apart = next((sub_buffer for _, sub_buffer, _ in shared if sub_buffer.comm is not comm), None)
            if apart is not None:
                raise ConfigError(
                    f"optimizer {self.name} sees whole tensors, and {apart.label} is shared by other ranks "
                    "than the rest of the model: that is not available in this version; give an optimizer "
                    "that updates element by element, as AdamW"
                )
            self._whole = WholeTensors([(sub_buffer, index) for _, sub_buffer, index in shared], comm)
            self._shared = [
                _StandIn(*item, nn.Parameter(item[1].optimizer_shard.master.new_empty(0)), None)
                if number in self._whole.owned
                else None
                for number, item in enumerate(shared)
            ]
            self._stand_ins += [stand_in for stand_in in self._shared if stand_in is not None]
            for _, sub_buffer, index in shared:
                sub_buffer.optimizer_shard.states_of_whole[index] = dict
        for stand_in in self._stand_ins:
            if not stand_in.wrapped.is_elementwise:
                stand_in.sub_buffer.optimizer_shard.states_of_whole[stand_in.member_index] = partial(
                    getattr, stand_in, "state"
                )
            own_group = stand_in.wrapped.groups.index(
                stand_in.sub_buffer.members[stand_in.member_index].group
            )
            stand_in.wrapped.optimizer.param_groups[own_group]["params"].append(stand_in.param)
        self._take_states(optimizer_of)

    @torch.no_grad()
    def _take_states(self, optimizer_of: Mapping[int, StandInOptimizer]) -> None:
        """Take over states that the optimizers already have: some make them at construction."""
        beside: ByName = {}
        for sub_buffer in self._sub_buffers:
            for index, member in enumerate(sub_buffer.members):
                wrapped = optimizer_of[member.group]
                for name, value in wrapped.states.get(member.param, {}).items():
                    is_tensor = isinstance(value, Tensor)
                    if (
                        wrapped.is_elementwise
                        and name != "step"
                        and is_tensor
                        and value.shape == member.param.shape
                    ):
                        sub_buffer.copy_fragment(index, value, _state_of(sub_buffer, name))
                    else:
                        beside.setdefault(sub_buffer.true_name(index), {})[name] = (
                            value.clone() if is_tensor else value
                        )
        if any(wrapped.states for wrapped in self._optimizers):
            self.load_beside(beside)
        for wrapped in self._optimizers:
            wrapped.states.clear()  # whole tensors, on every rank

    def _empty(
        self, sub_buffer: SubBuffer, optimizer_of: Mapping[int, StandInOptimizer]
    ) -> Iterator[_StandIn]:
        """Yield a stand-in without elements for each group that is absent from the shard, so that all ranks
        have the same states.
        """
        present = {
            one.sub_buffer.members[one.member_index].group
            for one in self._stand_ins
            if one.sub_buffer is sub_buffer
        }
        for index, member in enumerate(sub_buffer.members):
            wrapped = optimizer_of[member.group]
            if wrapped.is_elementwise and member.group not in present:
                present.add(member.group)
                nothing = slice(0, 0)
                yield _StandIn(
                    wrapped,
                    sub_buffer,
                    index,
                    nn.Parameter(sub_buffer.optimizer_shard.master[nothing]),
                    nothing,
                )

    # ---- a step

    def step(
        self, groups: Groups, *, step: int, grad_scale: float, after_sub_buffer: AfterSubBuffer | None
    ) -> None:
        """Step all parameters at once, because each optimizer counts its steps in its own way."""
        grads = {sub_buffer: _Grads(sub_buffer, grad_scale) for sub_buffer in self._sub_buffers}
        for stand_in in self._stand_ins:
            if stand_in.run is not None:
                stand_in.param.grad = grads[stand_in.sub_buffer].at(stand_in.run).view(stand_in.param.shape)
        if self._whole is not None:
            self._collect(self._whole, grads)
        self._forget_frozen()
        for wrapped in self._optimizers:
            _step(wrapped, groups)
        if self._whole is not None:
            self._hand_back(self._whole)
        self._take_back()
        for sub_buffer in self._sub_buffers:
            if sub_buffer.optimizer_shard.has_separate_master:
                sub_buffer.param_shard.own.copy_(sub_buffer.optimizer_shard.master)
            if after_sub_buffer is not None:
                after_sub_buffer(sub_buffer)

    def _forget_frozen(self) -> None:
        """Drop the gradients of frozen parameters: torch's optimizers then leave these alone."""
        for stand_in in self._stand_ins:
            if stand_in.member_index in stand_in.sub_buffer.optimizer_shard.frozen:
                stand_in.param.grad = None

    def _take_back(self) -> None:
        for stand_in in self._stand_ins:
            stand_in.param.grad = None
            if stand_in.run is not None:
                _return_to_master(stand_in, stand_in.run)
            if stand_in.wrapped.is_elementwise:
                _adopt_states(stand_in)

    def _collect(self, whole: WholeTensors, grads: dict[SubBuffer, _Grads]) -> None:
        runs = [(whole.index(number), _run(fragment)) for number, fragment in whole.held]
        values = whole.collect([sub_buffer.optimizer_shard.master[run] for (sub_buffer, _), run in runs])
        gradients = whole.collect([grads[sub_buffer].at(run) for (sub_buffer, _), run in runs])
        for number in whole.owned:
            stand_in = self._owned(number)
            shape = _shape(stand_in)
            stand_in.param.data = values[number].view(shape)
            stand_in.param.grad = gradients[number].view(shape)

    def _hand_back(self, whole: WholeTensors) -> None:
        values = {number: self._owned(number).param.detach().reshape(-1) for number in whole.owned}
        for (number, fragment), piece in zip(whole.held, whole.hand_back(values), strict=True):
            whole.index(number)[0].optimizer_shard.master[_run(fragment)].copy_(piece)
        for number in whole.owned:
            param = self._owned(number).param
            param.data = param.new_empty(0)

    def _owned(self, number: int) -> _StandIn:
        stand_in = self._shared[number]
        if stand_in is None:
            raise AssertionError(f"parameter {number} belongs to another rank")
        return stand_in

    # ---- what is remembered

    def reset_states(self, names: Sequence[str]) -> None:
        """Let the optimizers begin anew, the elements' states with zeros."""
        for wrapped in self._optimizers:
            wrapped.optimizer.state.clear()
        for sub_buffer in self._sub_buffers:
            sub_buffer.allocate_states(names)

    def beside(self) -> ByName:
        """Return all states that are not sharded by element: numbers, and the states of whole parameters."""
        values: ByName = {}
        for stand_in in self._stand_ins:
            kept = (
                set(stand_in.sub_buffer.optimizer_shard.states) if stand_in.wrapped.is_elementwise else set()
            )
            values[stand_in.name] = {
                name: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
                for name, value in stand_in.state.items()
                if name not in kept
            }
        return values

    def load_beside(self, saved: ByName) -> None:
        """Take saved state over. The optimizer makes the other parameters' states at the first step."""
        for stand_in in self._stand_ins:
            state = dict(saved.get(stand_in.name, {}))
            if stand_in.wrapped.is_elementwise and stand_in.run is not None:
                state |= {
                    name: flat[stand_in.run]
                    for name, flat in stand_in.sub_buffer.optimizer_shard.states.items()
                }
            if state:
                placed = {name: _placed(name, value, stand_in) for name, value in state.items()}
                stand_in.wrapped.optimizer.state[stand_in.param] = placed


class _Grads:
    """This rank's shard of the reduced gradients of one sub-buffer, in float32."""

    def __init__(self, sub_buffer: SubBuffer, grad_scale: float) -> None:
        grads = sorted(sub_buffer.gradients.pieces(0, sub_buffer.param_shard.own.numel()), key=itemgetter(0))
        pieces = [(offset, scaled_grad(grad, grad_scale)) for offset, grad in grads]
        self._offsets = [offset for offset, _ in pieces]
        self._pieces = [piece for _, piece in pieces]

    def at(self, run: slice) -> Tensor:
        """Return the gradients of a run of elements, in which no piece ends."""
        index = bisect_right(self._offsets, run.start) - 1
        start = self._offsets[index]
        return self._pieces[index][run.start - start : run.stop - start]


def wrap(
    client: torch.optim.Optimizer, groups: Groups, indices: Sequence[int], **kind: bool
) -> StandInOptimizer:
    """Return a copy of the client's optimizer with groups of its own that have these hyper-parameters."""
    copy = object.__new__(type(client))
    # Leave out `step`: a scheduler replaces it by one that is bound to the original.
    copy.__dict__.update({name: value for name, value in vars(client).items() if name != "step"})
    copy.param_groups = [
        {**client.defaults, **hyper_parameters(groups[index]), "params": []} for index in indices
    ]
    copy.state = defaultdict(dict)
    return StandInOptimizer(optimizer=copy, states=client.state, groups=tuple(indices), **kind)


def _step(wrapped: StandInOptimizer, groups: Groups) -> None:
    """Step with the hyper-parameters of the user's groups, and copy changed ones back to these groups."""
    pairs = [
        (own, groups[index])
        for own, index in zip(wrapped.optimizer.param_groups, wrapped.groups, strict=True)
    ]
    for own, users in pairs:
        own.update(hyper_parameters(users))
    with torch.enable_grad():  # as in a training loop; an optimizer switches it off by itself
        wrapped.optimizer.step()
    for own, users in pairs:
        users.update(hyper_parameters(own))


def _local(wrapped: StandInOptimizer, sub_buffer: SubBuffer, index: int) -> Iterator[_StandIn]:
    """Yield the stand-in for the run of a parameter that this rank's shard holds, if it holds any."""
    slot = sub_buffer.layout.slots[index]
    fragment = sub_buffer.layout.fragment(
        slot, sub_buffer.plan.shard_index, num_shards=sub_buffer.plan.num_shards
    )
    if fragment is not None:
        run = _run(fragment)
        values = sub_buffer.optimizer_shard.master[run]
        stand_in = _StandIn(wrapped, sub_buffer, index, nn.Parameter(values), run)
        if not wrapped.is_elementwise:
            stand_in.param.data = values.view(_shape(stand_in))
        yield stand_in


def _return_to_master(one: _StandIn, run: slice) -> None:
    """Let the stand-in lie in the master again if the optimizer has given it other memory,
    by `p.data = ...`.
    """
    values = one.sub_buffer.optimizer_shard.master[run]
    if one.param.data_ptr() != values.data_ptr():
        values.copy_(one.param.detach().reshape(-1))
        one.param.data = values.view(one.param.shape)


def _run(fragment: Fragment) -> slice:
    return slice(fragment.offset_in_shard, fragment.offset_in_shard + fragment.numel)


def _shape(one: _StandIn) -> tuple[int, ...]:
    """Return the shape in which the optimizer wants the whole parameter."""
    shape = one.sub_buffer.layout.slots[one.member_index].shape
    return (shape[0], prod(shape[1:])) if one.wrapped.as_matrices else shape


def _adopt_states(one: _StandIn) -> None:
    """Move the optimizer's states of each element into the sub-buffer's states."""
    for name, value in one.state.items():
        if not isinstance(value, Tensor) or value.shape != one.param.shape:
            continue
        if value.dtype != one.param.dtype:
            raise ConfigError(
                f"optimizer {type(one.wrapped.optimizer).__name__} keeps {value.dtype} in its state "
                f"'{name}'; one that is stepped on shards keeps float32: leave out its is_elementwise"
            )
        index = _state_of(one.sub_buffer, name)[one.run]
        if value.data_ptr() != index.data_ptr():
            index.copy_(value)
            one.state[name] = index


def _state_of(sub_buffer: SubBuffer, name: str) -> Tensor:
    """Return the sub-buffer's state of that name, zeros where it is new."""
    if name not in sub_buffer.optimizer_shard.states:
        sub_buffer.optimizer_shard.states[name] = torch.zeros_like(sub_buffer.optimizer_shard.master)
    return sub_buffer.optimizer_shard.states[name]


def _placed(name: str, value: Any, one: _StandIn) -> Any:
    """Return a loaded state in the memory where torch keeps it: step counts in host memory, unless kernels
    read them.
    """
    if not isinstance(value, Tensor):
        return value
    defaults = one.wrapped.optimizer.defaults
    stays = name == "step" and not (defaults.get("capturable") or defaults.get("fused"))
    return value if stays else value.to(one.param.device)
