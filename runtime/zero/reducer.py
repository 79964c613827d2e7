"""When the gradients of a model are averaged over the ranks, and in which order.

At the boundary, all are, in definition order. In every backward, each sub-buffer is as soon as autograd has
finished it, so that its memory is free for the next, in an order that is the same on all ranks (schedule.py).
What a backward does not reach is zero.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from ..comm.collectives import Collectives, Pending, nothing_before
from .gradients import FlatGradients
from .prefetch import in_backward
from .reduce_schedule import Schedule
from .sharded_gradients import ShardedGradients
from .sub_buffer import SubBuffer

IN_FLIGHT = 2  # collectives under way at once: one on the wire while the other is added up


class Reducer(Protocol):
    """Order: a collective, one way or the other"""

    is_coalescing: bool  # inside `coalesced`: gradients are this rank's own
    is_settled: bool  # all ranks have asked since the last backward whether one of them is behind

    def begin_backward(self) -> None:
        """A backward of the engine's is about to run."""

    def end_backward(self) -> None:
        """It has run."""

    def finish(self) -> None:
        """At a boundary: all shards are averages afterwards."""

    def coalesced(self) -> AbstractContextManager[None]:
        """Of all backwards inside, the sum is averaged, once, at the end."""

    @property
    def is_behind(self) -> bool:
        """Whether this rank needs `catch_up`; after `finish`."""

    def catch_up(self) -> None:
        """Where any rank is behind: average what came late."""

    def average_all(self) -> None:
        """At a boundary: every rank has all averages afterwards, where it has room for them.

        Another finish() is due.
        """

    def forget(self) -> None:
        """Nothing of a backward that failed is under way afterwards, nor counts."""

    def release(self) -> None:
        """Stop watching the parameters."""


class BoundaryReducer:
    """All at the boundary."""

    is_coalescing = False
    is_settled = True
    is_behind = False

    def __init__(self, parts: Sequence[SubBuffer], comm: Collectives) -> None:
        self._parts = tuple(parts)
        self._comm = comm
        self._queue = _Queue(comm)

    def begin_backward(self) -> None:
        """Nothing happens in a backward."""

    def end_backward(self) -> None:
        """Nor at its end."""

    def finish(self) -> None:
        for part in self._parts:
            self._queue.put(part)
        self._queue.drain()

    def coalesced(self) -> AbstractContextManager[None]:
        """It is so in any case."""
        return nullcontext()

    def catch_up(self) -> None:
        """Nothing comes late."""

    def average_all(self) -> None:
        self.finish()
        for part in self._parts:
            self._comm.gather(_flat(part).flat, what=part.label).wait()

    def forget(self) -> None:
        """Nothing is under way between two calls."""

    def release(self) -> None:
        """Nothing is watched."""


class BackwardReducer:
    """Each sub-buffer in every backward, while that goes on; see [Note: one order on all ranks]."""

    def __init__(self, parts: Sequence[SubBuffer], comm: Collectives) -> None:
        self._parts = tuple(parts)
        self._gradients = tuple(_sharded(part) for part in parts)
        self._comm = comm
        self._queue = _Queue(comm)
        self._schedule = Schedule(len(self._parts))
        self._is_engines = False  # the engine runs this backward, and calls end_backward
        self._is_under_way = False
        self._foreign_task = -1  # a backward of autograd's that ends in none of the parameters
        self.is_coalescing = False
        self.is_settled = True
        comm.before_gather = self._before_gather
        self._hooks = [
            member.param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._hook(place, place_in_part)
            )
            for place, part in enumerate(self._parts)
            for place_in_part, member in enumerate(part.members)
        ]

    def begin_backward(self) -> None:
        self.forget()
        self._is_engines = True

    def end_backward(self) -> None:
        if self.is_coalescing:
            return
        self._ask_due()
        rest = self._schedule.take_rest()
        for place in rest:
            self._ask(place)
        self._queue.drain()
        if self._schedule.is_to_learn:
            seen = self._comm.all_gather_objects(self._schedule.seen, what="the order of gradients")
            self._schedule.learn(seen, rest)
        else:
            self._schedule.note_missed(rest)
        self._end()
        self.is_settled = False

    def finish(self) -> None:
        """Every backward has left averages, but for one whose end autograd did not tell,
        as it failed before.
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
            for part in self._parts:
                part.gradients.release()
            raise
        finally:
            self.is_coalescing = False
            self._end()
        for place in reversed(range(len(self._parts))):
            for place_in_part, member in enumerate(self._parts[place].members):
                if member.param.grad is not None:
                    self._gradients[place].hand_in(place_in_part)
            self._ask(place)
        self._queue.drain()

    @property
    def is_behind(self) -> bool:
        return self._schedule.is_behind or bool(self._late)

    def catch_up(self) -> None:
        """Order: a collective"""
        self.is_settled = True
        everywhere = self._comm.all_gather_objects(self._late, what="gradients that came late")
        late = sorted({place for places in everywhere for place in places})
        self._schedule.note_outdated(late)
        for place in late:
            self._ask(place)
        self._queue.drain()

    @property
    def _late(self) -> list[int]:
        """Between backwards: places that got gradients after they were averaged."""
        return [place for place, gradients in enumerate(self._gradients) if gradients.is_begun]

    def average_all(self) -> None:
        """Every backward has averaged what it made, and no rank has room for all of it."""

    def forget(self) -> None:
        if not self.is_coalescing and (self._is_engines or self._is_under_way):
            self._ask_due()  # so that all ranks that failed here have asked for the same
            self._queue.abandon()
            for gradients in self._gradients:
                gradients.forget()
        self._end()

    def release(self) -> None:
        self._comm.before_gather = nothing_before
        for hook in self._hooks:
            hook.remove()

    def _hook(self, place: int, place_in_part: int) -> Callable[[Tensor], None]:
        # torch holds such a hook where the garbage collector does not look: what it refers to lives as long
        # as the parameter, and we refer to that.
        reference = weakref.ref(self)

        def hand_in(_: Tensor) -> None:
            reducer = reference()
            if reducer is not None and not reducer.is_coalescing:
                reducer._hand_in(place, place_in_part)

        return hand_in

    def _hand_in(self, place: int, place_in_part: int) -> None:
        if not self._is_under_way:
            self._begin()
        if self._schedule.was_asked(place):
            self._queue.finish(self._parts[place])  # its memory is in use until then
        self._gradients[place].hand_in(place_in_part)
        self._schedule.hand_in(place)
        if self._gradients[place].is_complete:
            self._ask_finished()

    def _begin(self) -> None:
        """Of a backward that the user runs without the engine, autograd tells the end."""
        if not self._is_engines:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        self._is_under_way = True

    def _before_gather(self, what: str) -> None:
        """All ranks are about to gather this."""
        if self.is_coalescing or not (self._is_engines or self._is_under_way or self._is_users_backward()):
            return
        self._ask_due()
        self._schedule.pass_gather(what)

    def _is_users_backward(self) -> bool:
        """Whether autograd runs a backward that ends in parameters, which the engine was not told of;
        it has begun then.
        """
        task = torch._C._current_graph_task_id()
        if not in_backward() or task == self._foreign_task:
            return False
        if any(is_reached(member.param) for part in self._parts for member in part.members):
            self._begin()
            return True
        self._foreign_task = task
        return False

    def _ask_finished(self) -> None:
        """Ask for what is due in this segment, as far as this rank has finished it."""
        while self._schedule.next_due is not None and self._is_finished(self._schedule.next_due):
            self._ask(self._schedule.take_due())

    def _is_finished(self, place: int) -> bool:
        return self._gradients[place].is_complete and self._schedule.has_all(place)

    def _ask_due(self) -> None:
        """Ask for all that is due in this segment."""
        while self._schedule.next_due is not None:
            self._ask(self._schedule.take_due())

    def _ask(self, place: int) -> None:
        self._gradients[place].complete()
        self._queue.put(self._parts[place])

    def _end(self) -> None:
        self._schedule.begin()
        self._is_engines = self._is_under_way = False


def is_reached(param: nn.Parameter) -> bool:
    """Whether the backward that autograd runs adds to its gradient; torch.autograd.grad() does not."""
    with torch._C.DisableTorchFunctionSubclass():
        node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad() returns it instead
        return False


class _Queue:
    """Collectives under way, at most IN_FLIGHT."""

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm
        self._under_way: deque[tuple[SubBuffer, Pending]] = deque()

    def put(self, part: SubBuffer) -> None:
        self._under_way.append((part, self._comm.reduce(_flat(part).flat, what=part.label)))
        if len(self._under_way) == IN_FLIGHT:
            self._finish_first()

    def drain(self) -> None:
        while self._under_way:
            self._finish_first()

    def finish(self, part: SubBuffer) -> None:
        """Up to this one."""
        while any(one is part for one, _ in self._under_way):
            self._finish_first()

    def abandon(self) -> None:
        while self._under_way:
            _, pending = self._under_way.popleft()
            pending.wait()  # the memory is in use until then

    def _finish_first(self) -> None:
        part, pending = self._under_way.popleft()
        pending.wait()
        _flat(part).keep()


def make_reducer(parts: Sequence[SubBuffer], comm: Collectives) -> Reducer:
    """What suits the gradients' placement: shards can only be filled in backward, and a rank without peers
    has nothing to do.
    """
    if any(part.gradients.is_reduced_in_backward for part in parts):
        return BackwardReducer(parts, comm)
    return BoundaryReducer(() if comm.mesh.world.is_alone else parts, comm)


def _flat(part: SubBuffer) -> FlatGradients:
    gradients = part.gradients
    if not isinstance(gradients, FlatGradients):
        raise AssertionError(f"the gradients of {part.members[0].name} do not lie in one buffer")
    return gradients


def _sharded(part: SubBuffer) -> ShardedGradients:
    gradients = part.gradients
    if not isinstance(gradients, ShardedGradients):
        raise AssertionError(f"the gradients of {part.members[0].name} are not sharded")
    return gradients
