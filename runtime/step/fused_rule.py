"""Any element-wise formula over this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..comm.collectives import Collectives
from ..optimizers.flat_arrays import ElementRun, FlatArrays
from ..optimizers.formula import Formula
from ..optimizers.random_bits import seed_of
from ..zero.units.sub_buffer import SubBuffer
from .pipeline import ReadyShard, StepPipeline
from .rule import AfterSubBuffer, ByName, Groups

_MISSED = "missed_steps"


class FusedRule:
    """Updates each shard with one call of the formula."""

    def __init__(self, formula: Formula) -> None:
        if not formula.is_elementwise:
            raise AssertionError(f"{formula.name} needs whole parameters, and shards end anywhere")
        self.name = formula.name
        self.steps_by_sub_buffer = self.states_may_leave = True
        self.groups_apart: frozenset[int] = frozenset()
        self._formula = formula
        self._sub_buffers: tuple[SubBuffer, ...] = ()
        self._groups: Groups = ()

    def attach(self, sub_buffers: Sequence[SubBuffer], groups: Groups, comm: Collectives) -> None:
        """Allocate the states."""
        self._sub_buffers, self._groups = tuple(sub_buffers), groups
        self.reset_states(())

    def reset_states(self, names: Sequence[str]) -> None:
        """Reset all states to those before the first step: the states of these names, and all that the
        formula needs.
        """
        wanted = {*names, *self._formula.names_for(self._groups)}
        for sub_buffer in self._sub_buffers:
            sub_buffer.allocate_states([name for name in self._formula.state_names if name in wanted])
            if self._formula.initial:
                with sub_buffer.here(is_written=True):
                    self._begin(sub_buffer)

    def beside(self) -> ByName:
        """Return how many steps each parameter has missed while it was frozen; empty if no parameter has
        missed any. All else that is counted is the engine's.
        """
        if not any(sub_buffer.optimizer_shard.missed for sub_buffer in self._sub_buffers):
            return {}
        return {
            sub_buffer.true_name(index): {_MISSED: sub_buffer.optimizer_shard.missed.get(index, 0)}
            for sub_buffer in self._sub_buffers
            for index in range(len(sub_buffer.members))
        }

    def load_beside(self, saved: ByName) -> None:
        """Go on with the saved step counts."""
        for sub_buffer in self._sub_buffers:
            counts = {
                index: saved.get(sub_buffer.true_name(index), {}).get(_MISSED, 0)
                for index in range(len(sub_buffer.members))
            }
            sub_buffer.optimizer_shard.missed = {
                index: int(missed) for index, missed in counts.items() if missed
            }

    def step(
        self, groups: Groups, *, step: int, grad_scale: float, after_sub_buffer: AfterSubBuffer | None
    ) -> None:
        """Update part by part, so that one part's parameters can travel while the next is updated."""
        update = self.sub_buffer_update(groups, step=step, grad_scale=grad_scale)
        StepPipeline(self._sub_buffers).run(update, after_sub_buffer=after_sub_buffer)

    def check(self, groups: Groups) -> None:
        """Check that a step can use these hyper-parameters, by a step of each group over zero elements.

        Errors: ValueError, which names the segment with the number of the group
        """
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        runs = tuple(ElementRun(offset=0, numel=0, group=group, step=1) for group in groups)
        states = dict.fromkeys(self._formula.state_names, nothing)
        arrays = FlatArrays(param=nothing, grads=(), states=states, runs=runs)
        self._formula.update_in_host_memory([arrays])

    def sub_buffer_update(
        self, groups: Groups, *, step: int, grad_scale: float
    ) -> Callable[[ReadyShard], None]:
        """Return the update of one part."""
        names = self._formula.names_for(groups)

        def update(ready: ReadyShard) -> None:
            for name in names:  # all are there where they are codes: Adam's groups always need them
                if name not in ready.states:  # a group has begun to need this state
                    dtype = ready.sub_buffer.plan.precision.states
                    ready.states[name] = torch.zeros_like(ready.master, dtype=dtype)
            self._formula.update([_arrays(ready, groups, step)], grad_scale=grad_scale)

        return update

    def _begin(self, sub_buffer: SubBuffer) -> None:
        for segment in sub_buffer.segments():
            for state, key in self._formula.initial.items():
                run = slice(segment.offset, segment.offset + segment.numel)
                sub_buffer.optimizer_shard.states[state][run] = self._groups[segment.group].get(key, 0.0)


def _arrays(ready: ReadyShard, groups: Groups, step: int) -> FlatArrays:
    cut = _runs_of_members if ready.sub_buffer.plan.is_rounded_by_random_bits else _runs
    return FlatArrays(
        param=ready.master,
        grads=ready.grads,
        states=ready.states,
        runs=cut(ready.sub_buffer, groups, step),
        param_out=ready.param_out,
    )


def _runs(sub_buffer: SubBuffer, groups: Groups, step: int) -> tuple[ElementRun, ...]:
    return tuple(
        ElementRun(offset=one.offset, numel=one.numel, group=groups[one.group], step=step - one.missed)
        for one in sub_buffer.segments()
    )


def _runs_of_members(sub_buffer: SubBuffer, groups: Groups, step: int) -> tuple[ElementRun, ...]:
    """Return a run for each parameter, with the seed of its random bits."""
    return tuple(
        ElementRun(
            offset=one.offset,
            numel=one.numel,
            group=groups[one.group],
            step=step - one.missed,
            seed=seed_of(sub_buffer.name_of_part(index), step),
            first=first,
        )
        for one, index, first in sub_buffer.segments_of_members()
    )
