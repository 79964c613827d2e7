"""When the gradients of a model are averaged over the ranks, and in which order.

At the boundary, all are, in definition order. In every backward, each sub-buffer is as soon as autograd has finished it, so
that its memory is free for the next; but every rank must ask for the same collectives in the same order, and which
parameters a rank's data reaches, and when, may differ. So all follow the order in which rank 0 finished in the first
backward, and whoever has finished something else waits with it; what a backward does not reach is zero, and goes at its end.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from ..comm.collectives import Collectives, Pending
from ..errors import ConfigError
from .gradients import FlatGradients
from .sharded_gradients import ShardedGradients
from .sub_buffer import SubBuffer

IN_FLIGHT = 2  # collectives under way at once: one on the wire while the other is added up


class Reducer(Protocol):
    """Order: a collective, one way or the other"""

    is_coalescing: bool  # inside `coalesced`: gradients are this rank's own

    def begin_backward(self) -> None:
        """A backward of the engine's is about to run."""

    def end_backward(self) -> None:
        """It has run."""

    def finish(self) -> None:
        """At a boundary: all shards are averages afterwards."""

    def coalesced(self) -> AbstractContextManager[None]:
        """Of all backwards inside, the sum is averaged, once, at the end."""

    def average_all(self) -> None:
        """At a boundary: every rank has all averages afterwards, where it has room for them. Another finish() is due."""

    def forget(self) -> None:
        """Nothing of a backward that failed is under way afterwards, nor counts."""

    def release(self) -> None:
        """Stop watching the parameters."""


class BoundaryReducer:
    """All at the boundary."""

    is_coalescing = False

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

    def average_all(self) -> None:
        self.finish()
        for part in self._parts:
            self._comm.gather(_flat(part).flat, what=part.label).wait()

    def forget(self) -> None:
        """Nothing is under way between two calls."""

    def release(self) -> None:
        """Nothing is watched."""


class BackwardReducer:
    """Each sub-buffer in every backward, while that goes on."""

    def __init__(self, parts: Sequence[SubBuffer], comm: Collectives) -> None:
        self._parts = tuple(parts)
        self._comm = comm
        self._queue = _Queue(comm)
        self._order: tuple[int, ...] = ()  # places of parts; empty until a first backward has shown it
        self._num_expected: dict[int, int] = {}  # hand-ins, by place; reentrant checkpointing makes them more
        self._num_handed_in: dict[int, int] = {}  # in this backward, by place, the last one last
        self._num_asked = 0  # of the order
        self._is_engines = False  # this backward has somebody who calls end_backward
        self._is_under_way = False
        self.is_coalescing = False
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
        for place in self._places[self._num_asked :]:
            self._ask(place)
        self._queue.drain()
        if not self._order:
            self._learn_order()
        self._reset()

    def finish(self) -> None:
        """Every backward has left averages, but for one whose end autograd did not tell, as it failed before."""
        if self._is_under_way:
            self.end_backward()

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Autograd adds up whole gradients in `p.grad` until then; what a block that failed has added up is lost."""
        self.is_coalescing = True
        try:
            yield
        except BaseException:
            for part in self._parts:
                part.gradients.release()
            raise
        finally:
            self.is_coalescing = False
        for place in self._places:
            gradients = _sharded(self._parts[place])
            for place_in_part, member in enumerate(self._parts[place].members):
                if member.param.grad is not None:
                    gradients.hand_in(place_in_part)
            self._ask(place)
        self._queue.drain()
        self._reset()

    def average_all(self) -> None:
        """Every backward has averaged what it made, and no rank has room for all of it."""

    def forget(self) -> None:
        self._queue.abandon()
        self._reset()

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, place: int, place_in_part: int) -> Callable[[Tensor], None]:
        # torch holds such a hook where the garbage collector does not look: what it refers to lives as long as the parameter,
        # and we refer to that.
        reference = weakref.ref(self)

        def hand_in(_: Tensor) -> None:
            reducer = reference()
            if reducer is not None and not reducer.is_coalescing:
                reducer._hand_in(place, place_in_part)

        return hand_in

    def _hand_in(self, place: int, place_in_part: int) -> None:
        self._watch_end()
        if place in self._order[: self._num_asked]:
            raise _late(self._parts[place], place_in_part)
        _sharded(self._parts[place]).hand_in(place_in_part)
        self._num_handed_in[place] = self._num_handed_in.pop(place, 0) + 1
        self._go_on()

    @property
    def _places(self) -> tuple[int, ...]:
        return self._order or tuple(reversed(range(len(self._parts))))

    def _watch_end(self) -> None:
        """Of a backward that the user runs without the engine, autograd tells the end."""
        if not self._is_under_way and not self._is_engines:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        self._is_under_way = True

    def _go_on(self) -> None:
        """Ask for what is next, as far as it is finished."""
        while self._num_asked < len(self._order) and self._is_finished(self._order[self._num_asked]):
            self._num_asked += 1
            self._ask(self._order[self._num_asked - 1])

    def _is_finished(self, place: int) -> bool:
        is_complete = _sharded(self._parts[place]).is_complete
        return is_complete and self._num_handed_in[place] >= self._num_expected.get(place, 0)

    def _ask(self, place: int) -> None:
        part = self._parts[place]
        _sharded(part).complete()
        self._queue.put(part)

    def _learn_order(self) -> None:
        seen = self._comm.all_gather_objects(self._num_handed_in, what="the order of gradients")
        for counts in seen:
            for place, count in counts.items():
                self._num_expected[place] = max(count, self._num_expected.get(place, 0))
        finished = [place for place, count in seen[0].items() if count >= len(self._parts[place].members)]
        rest = [place for place in reversed(range(len(self._parts))) if place not in finished]
        self._order = (*finished, *rest)

    def _reset(self) -> None:
        for part in self._parts:
            _sharded(part).forget()
        self._num_handed_in.clear()
        self._num_asked = 0
        self._is_engines = self._is_under_way = False


def _late(part: SubBuffer, place_in_part: int) -> ConfigError:
    return ConfigError(
        f"parameter '{part.members[place_in_part].name}' got more gradients in this backward than in the first one, after "
        "what it had was averaged over the ranks: reentrant activation checkpointing uses it more often now; write "
        "use_reentrant=False, or use stage 0 or 1"
    )


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

    def abandon(self) -> None:
        while self._under_way:
            _, pending = self._under_way.popleft()
            pending.wait()  # the memory is in use until then

    def _finish_first(self) -> None:
        part, pending = self._under_way.popleft()
        pending.wait()
        _flat(part).keep()


def make_reducer(parts: Sequence[SubBuffer], comm: Collectives) -> Reducer:
    """What suits the gradients' placement: shards can only be filled in backward, and who is alone has nothing to do."""
    if any(isinstance(part.gradients, ShardedGradients) for part in parts):
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
