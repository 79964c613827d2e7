"""Stand-ins for the model's parameters, which a torch optimizer is given in their place."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..offload.device_copies import to_host
from ..zero.parameters.layout import Fragment
from ..zero.units.sub_buffer import SubBuffer
from .pipeline import ReadyShard
from .rule import Groups, hyper_parameters, scaled_grad


@dataclass(frozen=True, slots=True, kw_only=True)
class StandInOptimizer:
    """A copied optimizer, which may be changed, and the user's parameter groups that its groups stand for."""

    optimizer: torch.optim.Optimizer
    states: MutableMapping[
        Tensor, Any
    ]  # states that it remembers already, by the model's parameters; taken over, and emptied
    groups: tuple[int, ...]
    is_elementwise: bool  # the optimizer treats every element alone
    is_per_parameter: bool  # the optimizer steps each parameter by itself
    as_matrices: bool = False  # the optimizer takes only matrices: all dimensions but the first are merged


@dataclass(slots=True, kw_only=True, eq=False)
class StandInParam:
    """Stand-in of the optimizer for the parameter at `member_index` of `sub_buffer`."""

    wrapped: StandInOptimizer
    sub_buffer: SubBuffer
    member_index: int
    param: nn.Parameter
    # elements of the shard; None: a whole parameter, whose values are sent here for the step only
    run: slice | None
    # names of its states that lie in the shard; where sub-buffers are stepped one by one, the optimizer has
    # them during the step only
    kept: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.sub_buffer.true_name(self.member_index)

    @property
    def group(self) -> int:
        """Number of the user's parameter group."""
        return self.sub_buffer.members[self.member_index].group

    @property
    def is_elementwise(self) -> bool:
        """Tell whether the optimizer treats every element alone."""
        return self.wrapped.is_elementwise

    @property
    def state(self) -> dict[str, Any]:
        """State of the parameter in the optimizer, once it has stepped."""
        state: dict[str, Any] = self.wrapped.optimizer.state.get(self.param, {})
        return state

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in which the optimizer wants the whole parameter."""
        shape = self.sub_buffer.whole_shape(self.member_index)
        return (shape[0], prod(shape[1:])) if self.wrapped.as_matrices else shape

    def whole(self, part: Tensor) -> Tensor:
        """Return a value of the whole parameter, as the optimizer wants it, from this rank's part of it; the
        part is all of it unless the parameter is divided over ranks (tensor_parallel).

        Shapes: part 1-D
        Order:  a collective where the parameter is divided
        """
        shape = self.sub_buffer.layout.slots[self.member_index].shape
        return self.sub_buffer.gather_parts(self.member_index, part.view(shape)).view(self.shape)

    def own_part(self) -> Tensor:
        """Return this rank's part of the whole parameter, 1-D."""
        whole = self.param.detach().reshape(self.sub_buffer.whole_shape(self.member_index))
        return self.sub_buffer.part_of(self.member_index, whole).reshape(-1)

    def take(self, run: slice, shard: ShardAtHand) -> None:
        """Lie in the shard for a step, gradient and states included."""
        values, grad = shard.master[run], shard.grads_at(run)
        self.param.data = values if self.is_elementwise else self.whole(values)
        self.param.grad = grad if self.is_elementwise else self.whole(grad)
        if self.kept:
            states = self.wrapped.optimizer.state[self.param]
            states.update({name: shard.states[name][run] for name in self.kept})

    def let_go(self) -> None:
        """Refer to no memory of the shard, which goes elsewhere until the next step."""
        self.param.data = self.param.new_empty(0)
        self.kept = self.kept & self.state.keys()
        for name in self.kept:
            del self.state[name]

    def give_back(self, shard: ShardAtHand) -> None:
        """Let the shard have the new values and the states of each element."""
        self.param.grad = None
        if self.run is not None:
            values = shard.master[self.run]
            if self.param.data_ptr() != values.data_ptr():  # the optimizer has set `p.data`, or `whole` has
                values.copy_(self.param.detach().reshape(-1) if self.is_elementwise else self.own_part())
                self.param.data = values
        if self.is_elementwise:
            self._adopt_states(shard)

    def _adopt_states(self, shard: ShardAtHand) -> None:
        """Move the optimizer's states of each element into the shard's states."""
        for name, value in self.state.items():
            if not isinstance(value, Tensor) or value.shape != self.param.shape:
                continue
            if value.dtype != self.param.dtype:
                raise ConfigError(
                    f"optimizer {type(self.wrapped.optimizer).__name__} keeps {value.dtype} in its state "
                    f"'{name}'; one that is stepped on shards keeps float32: leave out its is_elementwise"
                )
            own = shard.state(name)[self.run]
            if value.data_ptr() != own.data_ptr():
                own.copy_(value)
                self.state[name] = own
            self.kept.add(name)

    def placed(self, name: str, value: Any) -> Any:
        """Return a loaded state in the memory where it lies between steps. Step counts are in host memory, as
        torch keeps them, unless kernels read them.
        """
        if not isinstance(value, Tensor):
            return value
        defaults = self.wrapped.optimizer.defaults
        if name == "step" and not (defaults.get("capturable") or defaults.get("fused")):
            return value
        residence = self.sub_buffer.residence
        if residence.steps_on_host and value.numel() > 1:
            return to_host(value, pin_memory=residence.pins_states)
        return value.to(self.sub_buffer.device)


class ShardAtHand:
    """One sub-buffer's shard where the optimizer steps: master, states, and the reduced gradients in
    float32.
    """

    def __init__(self, ready: ReadyShard, grad_scale: float) -> None:
        self.ready = ready
        grads = sorted(ready.grads, key=itemgetter(0))
        pieces = [(offset, scaled_grad(grad, grad_scale)) for offset, grad in grads]
        self._offsets = [offset for offset, _ in pieces]
        self._pieces = [piece for _, piece in pieces]

    @property
    def master(self) -> Tensor:
        return self.ready.master

    @property
    def states(self) -> dict[str, Tensor]:
        return self.ready.states

    def state(self, name: str) -> Tensor:
        """Return the state of that name, zeros where it is new."""
        if name not in self.states:
            self.states[name] = torch.zeros_like(self.master)
        return self.states[name]

    def grads_at(self, run: slice) -> Tensor:
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


def stand_ins_of_shard(
    sub_buffer: SubBuffer, optimizer_of: dict[int, StandInOptimizer]
) -> Iterator[StandInParam]:
    """Yield the stand-ins for what this rank's shard holds: runs of parameters for an optimizer that treats
    every element alone, and whole parameters where the shard is all there is. Groups that are absent from the
    shard have a stand-in without elements, so that all ranks have the same states.
    """
    present = set()
    for index, member in enumerate(sub_buffer.members):
        wrapped = optimizer_of[member.group]
        run = _own_run(sub_buffer, index)
        if run is not None and (wrapped.is_elementwise or sub_buffer.plan.num_shards == 1):
            present.add(member.group)
            yield _stand_in(wrapped, sub_buffer, index, run)
    for index, member in enumerate(sub_buffer.members):
        wrapped = optimizer_of[member.group]
        if wrapped.is_elementwise and member.group not in present:
            present.add(member.group)
            yield _stand_in(wrapped, sub_buffer, index, slice(0, 0))


def _own_run(sub_buffer: SubBuffer, index: int) -> slice | None:
    slot, plan = sub_buffer.layout.slots[index], sub_buffer.plan
    fragment = sub_buffer.layout.fragment(slot, plan.shard_index, num_shards=plan.num_shards)
    if fragment is None and not slot.numel and 0 not in sub_buffer.whole_shape(index):
        return slice(0, 0)  # other ranks have all parts
    return None if fragment is None else run_of(fragment)


def _stand_in(
    wrapped: StandInOptimizer, sub_buffer: SubBuffer, index: int, run: slice | None
) -> StandInParam:
    nothing = torch.empty(0, dtype=torch.float32, device=sub_buffer.device)
    return StandInParam(
        wrapped=wrapped, sub_buffer=sub_buffer, member_index=index, param=nn.Parameter(nothing), run=run
    )


def stand_in_of_whole(wrapped: StandInOptimizer, sub_buffer: SubBuffer, index: int) -> StandInParam:
    """Return a stand-in for a whole parameter, which this rank has during a step only."""
    return _stand_in(wrapped, sub_buffer, index, None)


def run_of(fragment: Fragment) -> slice:
    """Return the elements of the shard."""
    return slice(fragment.offset_in_shard, fragment.offset_in_shard + fragment.numel)
