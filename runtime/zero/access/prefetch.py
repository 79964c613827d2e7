"""Prefetching: the order in which units are unsharded and resharded.

A unit is unsharded when a module of it is entered, or when a backward reaches it. It is resharded when
another one is unsharded, unless a forward that is under way uses it, it is held, or it is the next one
anyway. The order in which units were unsharded last time tells which is next: that one is gathered while the
present one computes. A wrong guess costs one gather and nothing else.

Every rank must use the same units in the same order, for to unshard one is a collective. What a rank's data
changes inside a unit does not matter, nor which units its loss reaches: see unit_uses.py.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from ...comm.rank_group import RankGroup
from ..units.unit import Unit, UnitState
from ..units.unit_uses import UnitUse, UnitUses
from .lockstep import Lockstep, check_in_lockstep, in_lockstep
from .loose_forwards import LooseForwards, end_loose_forwards

_LET_GO_S = 0.01
_AHEAD = 2  # units that are kept if they come next; the first of them is gathered


def in_backward() -> bool:
    """True if autograd runs this: a hook of it, or a forward that is computed again."""
    return torch._C._current_graph_task_id() != -1


class Route:
    """The order in which units were unsharded, as a hint for the next time."""

    def __init__(self) -> None:
        self._last: dict[bool, tuple[Unit, ...]] = {}  # whether gradients were wanted -> the order
        self._now: list[Unit] = []
        self._has_grad = False

    def begin(self) -> None:
        """Begin a forward of the whole model."""
        if self._now:
            self._last[self._has_grad] = tuple(self._now)
        self._now = []
        self._has_grad = torch.is_grad_enabled()

    def add(self, unit: Unit) -> None:
        self._now.append(unit)

    def ahead(self) -> tuple[Unit, ...]:
        """The units that were next last time, nearest first; none if this time has been different."""
        last, index = self._last.get(self._has_grad, ()), len(self._now)
        is_known = 0 < index <= len(last) and last[index - 1] is self._now[-1]
        return last[index : index + _AHEAD] if is_known else ()


class KeepsValues(Protocol):
    """A block of the program that may leave its unit's values to the next block.

    [Note: blocks of one unit]
    Programs read a model parameter by parameter, each in a block of its own, and would gather a unit once for
    each of its parameters. So the values of a block's only unit stay, until anything else is gathered, a
    forward, a step or a change. All ranks know which unit the last block had; whether it is still there, and
    as it was gathered, each says in the next block.
    """

    def are_right(self) -> bool:
        """Whether the values are still those that were gathered."""

    def have_all(self, has: bool) -> bool:
        """Whether all ranks have the values.

        Order: a collective
        """


class Prefetcher:
    """The units of one model. Order: every method that unshards a unit is a collective."""

    def __init__(self, units: Sequence[Unit], *, after_evaluation: Callable[[], None]) -> None:
        """`after_evaluation`, a collective: a forward without gradients that has gathered units ends."""
        self._units = tuple(units)
        self._after_evaluation = after_evaluation
        # Units that `reshard` may have to act on: few, of however many there are.
        self._unsharded: dict[Unit, None] = {}
        for unit in self._units:
            unit.on_unshard = self._note
        self._has_gathered = False
        self._route = Route()
        self._current: Unit | None = None
        self.num_forwards = 0  # forwards under way
        self._held: Counter[Unit] = Counter()
        self._blocks: list[Sequence[Unit]] = []  # units held for blocks of the program
        self._until_end: set[Unit] = (
            set()
        )  # units used outside their module, kept until the forward or the backward ends
        # The uses of the running forward, and the place of the backward in the uses of an earlier forward.
        self._uses = UnitUses()
        self._walk: UnitUse | None = None
        self._is_engines = False  # the engine runs this backward, and calls end_backward
        self._is_end_awaited = False
        # The number that autograd gave the backward; in it, a checkpoint of the reentrant kind runs others.
        self._backward: int | None = None
        self._lockstep: Lockstep | None = None
        self._loose: LooseForwards | None = None  # where ranks may run different numbers of forwards
        self._is_loose = False  # such a forward is under way
        # The unit of the program's last block, if that had one unit: another block of it may find it kept.
        self._last: Unit | None = None

    # ---- forward

    @property
    def is_running(self) -> bool:
        """True while a forward or a backward is under way."""
        return self.num_forwards > 0 or in_backward()

    def is_at(self, unit: Unit) -> bool:
        """Whether a forward is under way whose last unit is this one, and all of it is unsharded."""
        return self.num_forwards > 0 and unit is self._current and unit.state is UnitState.LIVE

    def enter(self, unit: Unit) -> None:
        """Begin a forward of this unit."""
        is_again = in_backward()
        if not is_again and not self.num_forwards:
            self._route.begin()
            self._has_gathered = False
            self._is_loose = not (self._loose is None or self._lockstep or torch.is_grad_enabled())
            if self._lockstep is not None:
                self._lockstep.begin_forward()
            self._current = None
            self._is_engines = self._is_end_awaited = False  # a backward failed
            self._walk = self._backward = None
            if unit is self._units[-1] or self._uses.is_walked or unit in self._uses:
                self._uses = UnitUses()
        self._note_backward()
        if is_again and self._walk is not None:
            uses, index = self._walk
            place = uses.find(unit, index) if index < len(uses) else index
            self._pass(uses, index, place, keeps=True)
            self._walk = uses, place
        # An operation of the backward that computes this again may have values of any unit at hand.
        self._unshard(unit, may_reshard=not is_again)
        unit.wait_for_unshard()
        unit.num_forwards += 1  # counted only if the forward could begin
        self.num_forwards += 1

    def leave(self, unit: Unit) -> None:
        """End a forward of this unit."""
        unit.num_forwards -= 1
        self.num_forwards -= 1
        if not self.num_forwards and not in_backward():
            self._until_end.clear()
            self._is_loose = False
            self._current = None  # a backward comes to it anew
            if torch.is_grad_enabled():
                self._reshard_but(self._route.ahead())
            else:
                self._reshard_all()

    def end_forward(self) -> None:
        """Note that no forward is under way: one that was left has not failed."""
        if self._lockstep is not None:  # other ranks may run other forwards, or none
            if not (self.num_forwards or in_backward()):
                self._lockstep.end_forward()
            return
        if self._has_gathered and not (self.num_forwards or in_backward() or torch.is_grad_enabled()):
            if self._loose is None:
                self._after_evaluation()
            else:
                self._loose.end_forward()

    def note_use(self, unit: Unit, *, is_output: bool, stays: bool = False) -> UnitUse | None:
        """A forward has used the unit, so that a backward will; None in a backward, as of a forward that is
        computed again.

        `stays`: the backward keeps it then.
        """
        if in_backward():
            return None
        return self._uses, self._uses.add(unit, is_output=is_output, stays=stays)

    # ---- backward

    def begin_backward(self) -> None:
        """Prepare for a backward that the engine runs."""
        self._is_engines = True

    def enter_backward(self, unit: Unit, use: UnitUse | None) -> None:
        """Note that a backward is about to go through this unit, at this place of the forward.

        In a backward inside another one no unit is resharded: what was computed for it just before may have
        been saved as parameters, not as places.
        """
        self._note_backward()
        self._watch_end()
        is_inside = torch._C._current_graph_task_id() != self._backward
        self._unshard(unit, may_reshard=self._walk_to(use) and not is_inside)

    def unshard_values(self, unit: Unit, use: UnitUse | None = None) -> None:
        """Have values of this unit where they lie, for an operation of which a forward noted this
        use; others that it uses stay, too.
        """
        if unit is self._current and unit.is_here:
            return
        if in_backward():
            self._note_backward()
            self._watch_end()
            self._walk_to(use)
        self._unshard(unit, may_reshard=False)

    def unshard_until_end(self, unit: Unit) -> None:
        """Unshard values and parameters, until the forward or backward that is under way ends."""
        self.unshard_values(unit)
        unit.wait_for_unshard()
        self._until_end.add(unit)

    def end_backward(self) -> None:
        """Note that a backward has run."""
        if self._walk is None and self._is_engines and not self._uses.is_walked:
            self._walk = self._uses, len(self._uses)  # the loss has reached none of the uses
        self._end_walk()
        self._is_engines = self._is_end_awaited = False
        self._backward = None
        self._until_end.clear()
        self._current = None
        self._reshard_all()

    def hold_all(self) -> None:
        """Keep all units until the end of the step: a backward that makes a graph leaves
        their values in it.
        """
        for unit in self._units:
            unit.wait_for_unshard()
            self._held[unit] = max(1, self._held[unit])

    # ---- beside both

    @contextmanager
    def held(self, units: Sequence[Unit], keeps: KeepsValues | None = None) -> Iterator[None]:
        """Have these units unsharded inside. See [Note: blocks of one unit] for `keeps`."""
        last, self._last = self._last, None
        if last is not None:
            is_again = keeps is not None and tuple(units) == (last,) and not self._held[last]
            if is_again and keeps is not None and keeps.have_all(last.state is UnitState.KEPT):
                last.take_kept()
            last.drop_kept()
        for unit in units:
            unit.start_unshard()
            self._held[unit] += 1
        self._blocks.append(units)
        try:
            for unit in units:
                unit.wait_for_unshard()
            yield
        finally:
            self._blocks.remove(units)
            for unit in units:
                self._held[unit] -= 1
            idle = [unit for unit in units if not self._held[unit] and not unit.num_forwards]
            if keeps is not None and len(units) == 1 and idle and self._lockstep is None:
                self._last = idle[0]
                if keeps.are_right():
                    idle[0].keep()
            for unit in idle:
                if unit.state is not UnitState.KEPT:
                    unit.reshard()
            self._wait_for(idle)

    def drop_kept(self) -> None:
        """Give back the memory of a unit that is kept for another block. No other rank needs to do so."""
        if self._last is not None:
            self._last.drop_kept()

    def let_ranks_differ(self, holders: RankGroup, device: torch.device) -> None:
        """Let ranks run different numbers of forwards without gradients; see loose_forwards.py."""
        self._loose = LooseForwards(self._units, holders, device, is_running=lambda: self._is_loose)

    def forget_forwards(self) -> None:
        """Know nothing of earlier forwards: the model trains no more.

        Order: a collective
        """
        if self._loose is not None:
            self._loose.forget()

    @contextmanager
    def in_lockstep(self, holders: RankGroup, device: torch.device) -> Iterator[None]:
        """Let each rank run as many forwards inside as it likes; see lockstep.py.

        Order: a collective at each gather and at the end
        """
        self._reshard_all()
        self.drop_kept()
        self._last = None
        try:
            with in_lockstep(self._units, holders, device) as self._lockstep:
                try:
                    yield
                finally:
                    self._reshard_all()
        finally:
            self._lockstep = None

    @property
    def is_in_lockstep(self) -> bool:
        """Whether a block is open in which ranks may be at different places of the program."""
        return self._lockstep is not None

    @property
    def held_in_block(self) -> Unit | None:
        """A unit whose values are held for a block of the program; None if there is none."""
        return next((unit for units in self._blocks for unit in units if unit.is_sharded), None)

    def reshard_idle(self) -> None:
        """Reshard units that were unsharded early, or stayed."""
        self._reshard_but((), is_end=True)

    def end_step(self) -> None:
        """Reshard everything."""
        self._held.clear()
        self._until_end.clear()
        self._current = None
        self._reshard_all()

    def _unshard(self, unit: Unit, *, may_reshard: bool) -> None:
        if not unit.is_sharded or (unit is self._current and unit.is_here):
            return
        if unit is not self._current:
            self._current = unit
            self._route.add(unit)
        ahead = self._route.ahead() if self._walk is None else self._walk[0].before(self._walk[1], _AHEAD)
        if may_reshard:
            self._reshard_but((unit, *ahead))
        if unit.is_away and not self._has_gathered:
            self._has_gathered = True
            if self._loose is not None and self._is_loose:
                self._loose.begin()
        unit.start_unshard()
        if ahead:
            ahead[0].start_unshard()
        for later in ahead[1:]:
            later.start_read()
        unit.wait_for_values()

    def _walk_to(self, use: UnitUse | None) -> bool:
        """Go from the last use to this one, and return whether it comes next or later; see [Note: the order
        of a backward].
        """
        if use is None:
            return True
        uses, index = use
        if self._walk is None or self._walk[0] is not uses:
            self._end_walk()
            self._walk = uses, len(uses)
        before = self._walk[1]
        self._pass(uses, before, index + 1)
        self._walk = uses, min(index, before)
        return index <= before

    def _end_walk(self) -> None:
        """Pass over the remaining uses of one forward, since the backward has come to its end."""
        if self._walk is not None:
            uses, index = self._walk
            uses.is_walked = True
            self._pass(uses, index, 0)
            self._walk = None

    def _pass(self, uses: UnitUses, since: int, until: int, *, keeps: bool = False) -> None:
        """Gather the units between two places; `keeps`: keep them for a use of all, else drop them again."""
        for index in range(since - 1, until - 1, -1):
            unit, is_output, stays = uses.at(index)
            self._walk = uses, index
            self._unshard(unit, may_reshard=is_output and not keeps)
            if stays:
                self._until_end.add(unit)

    def _reshard_all(self) -> None:
        """Reshard the units that are not in use."""
        self._reshard_but((), is_end=True)
        self._wait_for(self._units)

    @staticmethod
    def _wait_for(resharded: Sequence[Unit]) -> None:
        """Wait until gloo's threads let go of what they gathered, a moment after they report it."""
        deadline = time.monotonic() + _LET_GO_S
        waiting = [unit for unit in resharded if unit.is_referred_to]
        while waiting and time.monotonic() < deadline:
            time.sleep(_LET_GO_S / 100)
            for unit in waiting:
                unit.reshard()
            waiting = [unit for unit in waiting if unit.is_referred_to]

    def _reshard_but(self, kept: Sequence[Unit], *, is_end: bool = False) -> None:
        """Reshard what is not used; before the end of a backward or an evaluation, without units that the
        backward finds here.
        """
        for unit in tuple(self._unsharded):
            if unit.is_resharded:
                del self._unsharded[unit]
                continue
            if unit.num_forwards or not (is_end or unit.reshard_after_forward):
                continue
            if not (unit in kept or self._held[unit] or unit in self._until_end):
                unit.reshard()

    def _note(self, unit: Unit) -> None:
        check_in_lockstep(unit, self._lockstep)
        end_loose_forwards()
        lockstep = self._loose.lockstep if self._loose is not None and self._is_loose else self._lockstep
        if lockstep is not None:
            lockstep.want(unit)
        self.drop_kept()
        self._unsharded[unit] = None

    def _note_backward(self) -> None:
        """Note which backward runs; what comes first is never in one inside it."""
        if self._backward is None and in_backward():
            self._backward = torch._C._current_graph_task_id()

    def _watch_end(self) -> None:
        """Have autograd tell the end of a backward that the user runs without the engine."""
        if not self._is_engines and not self._is_end_awaited:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
            self._is_end_awaited = True
