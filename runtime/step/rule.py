"""Rules: an optimizer's updates of this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..comm.collectives import Collectives
from ..optimizers.on_device import as_float as as_float, scaled_grad as scaled_grad
from ..zero.parameters.layout import Segment
from ..zero.units.sub_buffer import SubBuffer
from .pipeline import ReadyShard

Groups = Sequence[dict[str, Any]]  # an optimizer's param_groups
AfterSubBuffer = Callable[[SubBuffer], None]
ByName = dict[str, dict[str, Any]]  # parameter name -> state name -> value


class Rule(Protocol):
    """One update formula and its states.

    A state that has one number for each element lies in `SubBuffer.states`, sharded like the master. All else
    that an optimizer remembers of a parameter is beside it.
    """

    name: str
    steps_by_sub_buffer: bool  # where the states lie, by `sub_buffer_update`
    states_may_leave: bool  # the device between steps
    # numbers of groups whose parameters have states of another kind than the rest, and so lie in sub-buffers
    # of their own: a state of each element is as long as its sub-buffer's shard
    groups_apart: frozenset[int]

    def attach(self, sub_buffers: Sequence[SubBuffer], groups: Groups, comm: Collectives) -> None:
        """Prepare to update these sub-buffers."""

    def step(
        self, groups: Groups, *, step: int, grad_scale: float, after_sub_buffer: AfterSubBuffer | None
    ) -> None:
        """Multiply the reduced gradients with `grad_scale` and update masters and parameters, in place.

        `step` counts from 1; `after_sub_buffer` is called as each sub-buffer is done.
        """

    def reset_states(self, names: Sequence[str]) -> None:
        """Reset all states to those before the first step, and make states of these names, too."""

    def beside(self) -> ByName:
        """Return the optimizer's other values, which are not one per element, for this rank's parameters."""

    def load_beside(self, saved: ByName) -> None:
        """Take over saved values of `beside`, for all parameters, after the states were loaded."""


@runtime_checkable
class SubBufferRule(Rule, Protocol):
    """A rule that steps one sub-buffer at a time."""

    def sub_buffer_update(
        self, groups: Groups, *, step: int, grad_scale: float
    ) -> Callable[[ReadyShard], None]:
        """Return the function that updates one sub-buffer in such a step; any thread may call it."""


def runs(flat: Tensor, segments: Sequence[Segment]) -> list[Tensor]:
    """Return the views of `flat` that the segments name."""
    return [flat[segment.offset : segment.offset + segment.numel] for segment in segments]


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
