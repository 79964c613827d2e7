"""Any element-wise formula over this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..comm.collectives import Collectives
from ..optimizers.formula import FlatArrays, Formula, Run
from ..zero.sub_buffer import SubBuffer
from .pipeline import Ready, StepPipeline
from .rule import AfterPart, ByName, Groups

_MISSED = "missed_steps"


class FusedRule:
    """Updates each shard with one call of the formula."""

    def __init__(self, formula: Formula) -> None:
        if not formula.is_elementwise:
            raise AssertionError(f"{formula.name} needs whole parameters, and shards end anywhere")
        self.name = formula.name
        self.steps_by_part = True
        self._formula = formula
        self._parts: tuple[SubBuffer, ...] = ()
        self._groups: Groups = ()

    def attach(self, parts: Sequence[SubBuffer], groups: Groups, comm: Collectives) -> None:
        """Allocate the states."""
        self._parts, self._groups = tuple(parts), groups
        self.reset_states(())

    def reset_states(self, names: Sequence[str]) -> None:
        """Have these, of the formula's, and all that it needs, as before the first step."""
        wanted = {*names, *self._formula.names_for(self._groups)}
        for part in self._parts:
            part.allocate_states([name for name in self._formula.state_names if name in wanted])
            if self._formula.initial:
                with part.here(is_written=True):
                    self._begin(part)

    def beside(self) -> ByName:
        """The steps that parameters have missed while they were frozen, if any has;
        all others are the engine's.
        """
        if not any(part.optimizer_shard.missed for part in self._parts):
            return {}
        return {
            member.name: {_MISSED: part.optimizer_shard.missed.get(place, 0)}
            for part in self._parts
            for place, member in enumerate(part.members)
        }

    def load_beside(self, saved: ByName) -> None:
        """Go on to count those."""
        for part in self._parts:
            found = {
                place: saved.get(member.name, {}).get(_MISSED, 0) for place, member in enumerate(part.members)
            }
            part.optimizer_shard.missed = {place: int(missed) for place, missed in found.items() if missed}

    def step(self, groups: Groups, *, step: int, grad_scale: float, after_part: AfterPart | None) -> None:
        """Update part by part, so that one part's parameters can travel while the next is updated."""
        update = self.part_update(groups, step=step, grad_scale=grad_scale)
        StepPipeline(self._parts).run(update, after_part=after_part)

    def part_update(self, groups: Groups, *, step: int, grad_scale: float) -> Callable[[Ready], None]:
        """Return what a step does to one part."""
        names = self._formula.names_for(groups)

        def update(ready: Ready) -> None:
            for name in names:
                if name not in ready.states:  # a group has begun to need it
                    ready.states[name] = torch.zeros_like(ready.master)
            self._formula.update([_arrays(ready, groups, step)], grad_scale=grad_scale)

        return update

    def _begin(self, part: SubBuffer) -> None:
        for segment in part.segments():
            for state, key in self._formula.initial.items():
                run = slice(segment.offset, segment.offset + segment.numel)
                part.optimizer_shard.states[state][run] = self._groups[segment.group].get(key, 0.0)


def _arrays(ready: Ready, groups: Groups, step: int) -> FlatArrays:
    return FlatArrays(
        param=ready.master,
        grads=ready.grads,
        states=ready.states,
        runs=tuple(
            Run(offset=one.offset, numel=one.numel, group=groups[one.group], step=step - one.missed)
            for one in ready.part.segments()
        ),
        param_out=ready.param_out,
    )
