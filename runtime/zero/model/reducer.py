"""Averaging of a model's gradients over the ranks: when, and in which order.

Sharded gradients are averaged in every backward, so that their memory is free for the next; replicated ones
once for a step, in its last backward. Both are averaged sub-buffer by sub-buffer, as soon as autograd has
finished it, in an order that is the same on all ranks (reduce_schedule.py). A gradient that no backward
reaches is zero.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ...comm.rank_group import RankGroup
from ...comm.wire import nothing_before
from ...errors import ConfigError
from ...log import logger
from ...mesh.domain import Domains
from ..access.prefetch import in_backward
from ..gradients.gradients import FlatGradients
from ..gradients.replicated_gradients import ReplicatedGradients
from ..gradients.sharded_gradients import ShardedGradients
from ..units.sub_buffer import SubBuffer
from ..units.unit import Unit
from .guessed_order import GuessedOrder, GuessedUnit
from .reduce_schedule import Schedule
from .reductions import Reductions

T = TypeVar("T")
G = TypeVar("G", bound=FlatGradients)
IN_FLIGHT = 2  # collectives under way at once: one on the wire while the other is added up


class Reducer(ABC, Generic[G]):
    """Order: a collective, one way or the other

    [Note: ranks that wait for each other's tokens]
    A rank that does not use some layer asks for its place only at the end of the segment (see [Note: one
    order on all ranks]); where nothing is gathered that is the end of its backward. Until then another rank
    must not wait for it, if the two exchange tokens meanwhile: each would wait for the other. So all is asked
    for as it is finished, and waited for at the end of the segment. The memory for that is there: whole
    gradients always have it, and shards in the first backward, which averages at its end what is on no list.
    """

    def __init__(
        self,
        sub_buffers: Sequence[SubBuffer],
        kind: type[G],
        domains: Domains,
        guess: GuessedOrder | None = None,
    ) -> None:
        """The gradients of all `sub_buffers` are of this kind."""
        self._sub_buffers = tuple(sub_buffers)
        self._gradients = tuple(_gradients(sub_buffer, kind) for sub_buffer in sub_buffers)
        self._domains, self._job = domains, domains.job
        # None: see [Note: ranks that wait for each other's tokens]
        self._reductions = Reductions[G](None if domains.exchanges_tokens else IN_FLIGHT)
        self._schedule = Schedule(len(self._sub_buffers), guess)
        self._is_engines = False  # the engine runs this backward, and calls end_backward
        self._is_under_way = False  # a backward whose gradients are averaged in it has given one
        self.is_coalescing = False  # inside `coalesced`: gradients are this rank's own
        self._hooks = [
            member.param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._hook(index, index_in_sub_buffer)
            )
            for index, sub_buffer in enumerate(self._sub_buffers)
            for index_in_sub_buffer, member in enumerate(sub_buffer.members)
        ]

    # ---- backwards

    def begin_forward(self) -> None:
        """A forward begins outside of backwards: one that is under way has failed. Where a step averages, the
        others may wait for what that backward has not asked for until one begins, or a step.
        """

    @abstractmethod
    def begin_backward(self) -> None:
        """A backward of the engine's is about to run."""

    @abstractmethod
    def end_backward(self) -> None:
        """Note that a backward has run."""

    def coalesced(self) -> AbstractContextManager[None]:
        """Average the sum of all backwards inside once, at the end. There is nothing to do if none of them
        ends a step.
        """
        return nullcontext()

    @abstractmethod
    def forget(self) -> None:
        """End what a failed backward has under way; it does not count either, where that can be."""

    def end_failed(self) -> None:
        """Keep a backward that failed, and did not tell its end, from averaging values that a program may
        read or set. There is nothing to do where each backward averages in memory of its own.
        """

    # ---- steps

    @abstractmethod
    def finish(self) -> None:
        """Before a step: what this rank has made is averaged afterwards, but for what came late."""

    @property
    def is_behind(self) -> bool:
        """After `finish`: whether this rank needs `catch_up`."""
        return self._schedule.is_behind or bool(self._late)

    @abstractmethod
    def catch_up(self, *, is_step: bool = True) -> None:
        """Average what came late, where any rank is behind.

        `is_step`: all ranks of the job do it, before a step; else those alone that hold the same model.
        """

    @abstractmethod
    def settle(self) -> None:
        """Let gradients be averages of all that the backwards gave, if they are averages on any rank.

        Order: a collective of the ranks that hold the same model: programs ask for the gradients of one
               parameter after the other, and other ranks may have more of them
        """

    def average_all(self) -> None:
        """Before a step: every rank has all averages afterwards, where it has room for them: not of shards,
        which every backward has averaged.
        """

    def end_step(self) -> None:
        """The averages have been used. Where each backward averages, it begins anew in any case."""

    def release(self) -> None:
        """Stop watching the parameters."""
        for hook in self._hooks:
            hook.remove()

    # ---- what they share

    def _hook(self, index: int, index_in_sub_buffer: int) -> Callable[[Tensor], None]:
        # torch holds such a hook where the garbage collector does not look: what it refers to lives as long
        # as the parameter, and we refer to that.
        reference = weakref.ref(self)

        def hand_in(_: Tensor) -> None:
            reducer = reference()
            if reducer is not None and not reducer.is_coalescing:
                reducer._hand_in(index, index_in_sub_buffer)

        return hand_in

    @abstractmethod
    def _hand_in(self, index: int, index_in_sub_buffer: int) -> None:
        """Autograd has finished a gradient."""

    def _begin(self) -> None:
        """Have autograd tell the end of a backward that the user runs without the engine."""
        if not self._is_engines:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        self._is_under_way = True

    @property
    def _peers(self) -> RankGroup:
        """The ranks that run the same backwards: they need one order of all sub-buffers, also of those that
        few of them share.
        """
        return self._domains.dense.comm.sharers

    @property
    def _late(self) -> list[int]:
        """Places that got gradients after they were averaged, between backwards."""
        return [index for index, gradients in enumerate(self._gradients) if gradients.is_late]

    def _ask_finished(self) -> None:
        """Ask for what is due in this segment, as far as this rank has finished it."""
        while self._schedule.next_due is not None and self._is_finished(self._schedule.next_due):
            self._ask(self._schedule.take_due())

    def _is_finished(self, index: int) -> bool:
        return self._gradients[index].is_complete and self._schedule.has_all(index)

    def _ask_due(self) -> None:
        """Ask for all places that are due in this segment."""
        while self._schedule.next_due is not None:
            self._ask(self._schedule.take_due())

    def _ask_all(self) -> tuple[int, ...]:
        """Ask for all that is left, and wait for it; return what was on no list."""
        self._ask_due()
        rest = self._schedule.take_rest()
        for index in rest:
            self._ask(index)
        self._reductions.drain()
        return rest

    def _ask(self, index: int) -> None:
        self._gradients[index].complete()
        self._reductions.begin(self._sub_buffers[index], self._gradients[index])

    def _tell(self, own: T, *, is_step: bool) -> dict[int, T]:
        """Return the values of the ranks that take part, by rank; see `catch_up`."""
        what = "gradients that came late"
        if is_step:
            return dict(enumerate(self._job.all_gather_objects(own, what=what)))
        values = self._domains.holders.all_gather_objects(own, what=what)
        return dict(zip(self._domains.holder_ranks, values, strict=True))

    def _ask_again(self, late: Iterable[int]) -> None:
        for index in late:
            self._ask(index)
        self._reductions.drain()

    def _teach(self, rest: Iterable[int]) -> None:
        """Learn from a backward whose gradients are all averaged; those in `rest`, at its end."""
        if self._schedule.is_to_learn:
            own = self._schedule.seen, self._schedule.late_guesses(self._late)
            told = self._peers.all_gather_objects(own, what="the order of gradients")
            late = sorted({index for _, indices in told for index in indices})
            self._schedule.learn([seen for seen, _ in told], rest, late)
            self._ask_again(late)
        else:
            self._schedule.note_missed(rest)


class StepReducer(Reducer[ReplicatedGradients]):
    """Reducer that averages each sub-buffer once in a step, in the first backward that ends one; see
    [Note: one order on all ranks].

    Sub-buffers left then are asked for when that backward ends, or, on a rank that has run none, before the
    step. So all ranks ask for all of it in one order, however many backwards each of them runs. What comes
    later is averaged before the step, see [Note: averages before the step].
    """

    def __init__(
        self, sub_buffers: Sequence[SubBuffer], domains: Domains, *, ends_step: Callable[[], bool]
    ) -> None:
        super().__init__(sub_buffers, ReplicatedGradients, domains)
        self._ends_step = ends_step  # returns True if a backward that begins now is the last of a step
        self._rest: tuple[int, ...] | None = None  # places on no list; None until all are asked for
        self._is_taught = False
        self._misplaced: set[int] = set()  # got gradients in the same backward, after they were asked for
        self._has_finished = False  # the last gradient completed its sub-buffer

    def begin_backward(self) -> None:
        self.forget()
        self._is_engines = True

    def end_backward(self) -> None:
        if self._is_under_way or (self._is_engines and self._is_last):
            self._ask_rest()
        self._is_engines = self._is_under_way = False

    def forget(self) -> None:
        self.end_failed()

    def end_failed(self) -> None:
        """Ask for the sub-buffers that the other ranks wait for."""
        self.end_backward()

    def finish(self) -> None:
        self._ask_rest()
        if not self._is_taught:
            self._is_taught = True
            self._teach(self._rest or ())
        self._is_engines = self._is_under_way = False

    def catch_up(self, *, is_step: bool = True) -> None:
        """Order: a collective

        Errors: ConfigError, on all ranks that do it, if only some have dropped their gradients
        """
        is_dropped = any(gradients.was_dropped for gradients in self._gradients)
        own = (self._late, sorted(self._misplaced), self._schedule.is_behind, is_dropped)
        answers = self._tell(own, is_step=is_step)
        _check_dropped({rank: one for rank, (*_, one) in answers.items()})
        everywhere = [answers[rank] for rank in self._job.peers]
        misplaced = sorted({index for _, indices, _, _ in everywhere for index in indices})
        if misplaced or any(is_behind for _, _, is_behind, _ in everywhere):
            self._schedule.note_outdated(misplaced)
        self._misplaced.clear()
        self._ask_again(sorted({index for indices, *_ in everywhere for index in indices}))
        for gradients in self._gradients:
            gradients.was_dropped = False

    def settle(self) -> None:
        if not self._gradients:
            return
        for gradients in self._gradients:
            gradients.adopt()
        own = 0.0 if self._rest is None else 1.0 + bool(self._late)
        device, what = self._sub_buffers[0].device, "whether gradients are averaged"
        most = max(
            one for (one,) in self._domains.holders.all_gather_numbers([own], device=device, what=what)
        )
        if most:
            self.finish()
        if most > 1.0:
            self.catch_up(is_step=False)

    def average_all(self) -> None:
        self.finish()
        self.settle()
        for sub_buffer, gradients in zip(self._sub_buffers, self._gradients, strict=True):
            sub_buffer.comm.all_gather_(gradients.flat, what=sub_buffer.label).wait()
            gradients.note_gathered()

    def end_step(self) -> None:
        self._rest, self._is_taught = None, False
        self._misplaced.clear()
        self._schedule.begin()
        for gradients in self._gradients:
            gradients.end_step()

    @property
    def _is_last(self) -> bool:
        """Whether a backward that begins now averages what it makes; not what was moved to host memory."""
        return self._rest is None and self._ends_step() and all(one.is_here for one in self._gradients)

    def _hand_in(self, index: int, index_in_sub_buffer: int) -> None:
        gradients = self._gradients[index]
        if gradients.is_averaged:
            late = gradients.pop_late(index_in_sub_buffer)
            if late is not None:
                self._reductions.finish(self._gradients[index])  # its memory is in use until then
                gradients.add_late(index_in_sub_buffer, late)
            if self._is_under_way:
                self._misplaced.add(index)
            return
        if not self._is_under_way:
            if not self._is_last:
                return
            self._begin()
        # tested before this gradient, so that the program's own hooks have seen the last one, too
        if self._has_finished:
            self._has_finished = False
            self._ask_finished()
        gradients.hand_in(index_in_sub_buffer)
        self._schedule.hand_in(index)
        self._has_finished = gradients.is_complete

    def _ask_rest(self) -> None:
        if self._rest is None:
            self._rest = self._ask_all()


class BackwardReducer(Reducer[ShardedGradients]):
    """Reducer that averages each sub-buffer in every backward, while that runs; see [Note: one order on all
    ranks].
    """

    def __init__(self, sub_buffers: Sequence[SubBuffer], domains: Domains, guess: GuessedOrder) -> None:
        super().__init__(sub_buffers, ShardedGradients, domains, guess)
        self._wire = domains.wire
        self._has_failed = False  # True after a backward that failed, whose gradients may be here
        self._foreign_task = -1  # a backward of autograd's that ends in none of the parameters
        # True once all ranks have asked since the last backward whether one of them is behind
        self._is_settled = True
        self._wire.before_gather = self._before_gather

    def begin_forward(self) -> None:
        """Note whether a backward failed: its gradients are dropped where all ranks come next, which may be
        another place.
        """
        self._has_failed = self._is_engines or self._is_under_way

    def begin_backward(self) -> None:
        self._begin_anew()
        self._is_engines = True

    def end_backward(self) -> None:
        if self.is_coalescing:
            return
        self._teach(self._ask_all())
        self._end()
        self._is_settled = False

    def finish(self) -> None:
        """Do nothing: every backward has left averages, except one that failed earlier, whose end autograd
        did not tell.
        """
        if self._is_under_way:
            self.end_backward()

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Autograd adds up whole gradients in `p.grad` until then; what a block that failed
        has added up is lost.
        """
        self.is_coalescing = True
        try:
            yield
        except BaseException:
            for sub_buffer in self._sub_buffers:
                sub_buffer.gradients.release()
            raise
        finally:
            self.is_coalescing = False
            self._end()
        for index in reversed(range(len(self._sub_buffers))):
            for index_in_sub_buffer, member in enumerate(self._sub_buffers[index].members):
                if member.param.grad is not None:
                    self._gradients[index].hand_in(index_in_sub_buffer)
            self._ask(index)
            self._reductions.keep_fewer_than(IN_FLIGHT)  # no rank exchanges tokens here
        self._reductions.drain()

    def catch_up(self, *, is_step: bool = True) -> None:
        self._is_settled = True
        answers = self._tell(self._late, is_step=is_step)
        late = sorted({index for rank in self._job.peers for index in answers[rank]})
        self._schedule.note_outdated(late)
        self._ask_again(late)

    def settle(self) -> None:
        """Agree on whether a rank is behind, at most once after each backward."""
        if not self._is_settled:
            device, what = self._sub_buffers[0].device, "whether gradients came late"
            flags = self._domains.holders.all_gather_numbers([self.is_behind], device=device, what=what)
            if any(one for (one,) in flags):
                self.catch_up(is_step=False)
            self._is_settled = True

    def forget(self) -> None:
        self._drop_failed()

    def _begin_anew(self) -> None:
        """Drop what a failed backward left, as far as that can be."""
        if self._drop_failed() and self._job.is_first:
            logger.warning(
                "a backward failed after the ranks had averaged a part of its gradients, which are in one "
                "sum with those of the step's earlier micro batches and stay there; call engine.zero_grad() "
                "on all ranks after such a failure, and run all micro batches of the step again"
            )

    def _drop_failed(self) -> bool:
        """Drop what a failed backward made; return whether some of it counts, since it was added to the
        gradients of earlier micro batches of the step.
        """
        is_left = False
        if not self.is_coalescing and (self._is_engines or self._is_under_way):
            self._ask_due()  # then all ranks that failed here have asked for the same
            kept = self._reductions.abandon()
            for gradients in self._gradients:
                gradients.forget()
            for gradients in kept:
                is_left = not gradients.take_back() or is_left
        self._end()
        return is_left

    def release(self) -> None:
        self._wire.before_gather = nothing_before
        super().release()

    def _hand_in(self, index: int, index_in_sub_buffer: int) -> None:
        if self._has_failed:
            param = self._sub_buffers[index].members[index_in_sub_buffer].param
            grad = param.grad
            self._begin_anew()
            param.grad = grad
        if not self._is_under_way:
            self._begin()
        self._schedule.hand_in(index)
        if self._schedule.is_guess:  # that is over which came before; before this one takes memory
            self._ask_finished()
        if self._schedule.was_asked(index):
            self._reductions.finish(self._gradients[index])  # its memory is in use until then
        self._gradients[index].hand_in(index_in_sub_buffer)
        if self._gradients[index].is_complete:
            self._ask_finished()

    def _before_gather(self, what: str) -> None:
        """Prepare for a gather, which all ranks are about to begin."""
        if self._has_failed:
            self._begin_anew()
        if self.is_coalescing or not (self._is_engines or self._is_under_way or self._is_users_backward()):
            return
        self._ask_due()
        self._reductions.keep_fewer_than(IN_FLIGHT)
        self._schedule.pass_gather(what)

    def _is_users_backward(self) -> bool:
        """True if autograd runs a backward that ends in parameters, of which the engine was not told; the
        backward has begun then.
        """
        task = torch._C._current_graph_task_id()
        if not in_backward() or task == self._foreign_task:
            return False
        if any(is_reached(member.param) for sub_buffer in self._sub_buffers for member in sub_buffer.members):
            self._begin()
            return True
        self._foreign_task = task
        return False

    def _end(self) -> None:
        self._schedule.begin()
        self._is_engines = self._is_under_way = self._has_failed = False


def is_reached(param: nn.Parameter) -> bool:
    """True if the backward that autograd runs adds to the parameter's gradient; torch.autograd.grad() does
    not.
    """
    with torch._C.DisableTorchFunctionSubclass():
        node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad() returns it instead
        return False


def make_reducer(units: Sequence[Unit], domains: Domains, *, ends_step: Callable[[], bool]) -> Reducer[Any]:
    """Return the reducer for the gradients' placement: shards can only be filled in every backward, and a
    rank without peers has nothing to do.

    `ends_step` returns True if a backward that begins now is the last one of a step.
    """
    sub_buffers = [sub_buffer for unit in units for sub_buffer in unit.sub_buffers if sub_buffer.is_trained]
    in_backward = [sub_buffer for sub_buffer in sub_buffers if sub_buffer.gradients.is_reduced_in_backward]
    if in_backward:  # some may be a rank's own, without peers
        guess = _guess(units, in_backward, only_at_gathers=domains.exchanges_tokens)
        return BackwardReducer(in_backward, domains, guess)
    averaged = [sub_buffer for sub_buffer in sub_buffers if sub_buffer.mesh.has_average]
    return StepReducer(averaged, domains, ends_step=ends_step)


def _guess(units: Sequence[Unit], sub_buffers: Sequence[SubBuffer], *, only_at_gathers: bool) -> GuessedOrder:
    place_of = {sub_buffer: place for place, sub_buffer in enumerate(sub_buffers)}
    return GuessedOrder(
        [
            GuessedUnit(
                places=tuple(place_of[one] for one in unit.sub_buffers if one in place_of),
                gathers=tuple(one.label for one in unit.sub_buffers if _is_gathered(one)),
            )
            for unit in units
        ],
        only_at_gathers=only_at_gathers,
    )


def _is_gathered(sub_buffer: SubBuffer) -> bool:
    return sub_buffer.is_sharded and not sub_buffer.mesh.shard.is_alone


def _check_dropped(is_dropped: Mapping[int, bool]) -> None:
    """Refuse averages that only some ranks have set to zero, for they are neither those of all ranks nor
    none.

    Errors: ConfigError, on all these ranks
    """
    ranks = [str(rank) for rank, one in is_dropped.items() if one]
    if ranks and len(ranks) < len(is_dropped):
        raise ConfigError(
            f"engine.zero_grad() on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} only, after the "
            "backward that ends a step, in which the ranks have averaged their gradients; call it on all "
            "ranks, or before that backward, or run that backward in engine.no_sync(), so that the step "
            "averages"
        )


def _gradients(sub_buffer: SubBuffer, kind: type[G]) -> G:
    gradients = sub_buffer.gradients
    if not isinstance(gradients, kind):
        raise AssertionError(
            f"the gradients of {sub_buffer.members[0].name} are {type(gradients).__name__}, "
            f"not {kind.__name__}"
        )
    return gradients
