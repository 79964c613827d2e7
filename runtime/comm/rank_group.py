"""Groups of ranks that tell each other small values, in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .flight_recorder import JOB_LANE, Flight, Line
from .mesh import Axis
from .numbers import ReadBack, aside, on_device
from .pending import Pending, Steps
from .rank_names import RankNames
from .wire import Wire

T = TypeVar("T")

# torch 2.13 renamed it and deprecated the old name.
all_gather_single: Callable[..., dist.Work | None] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


class RankGroup:
    """The ranks of one axis. One rank alone sends nothing.

    Order: all of them must call the same methods in the same order
    """

    def __init__(self, axis: Axis, wire: Wire, *, line: Line | None = None, lane: int = 0) -> None:
        """`line` tells of ranks that do not have the same model which they are; `lane`: see
        flight_recorder.py.
        """
        self.axis, self.wire, self._line, self.lane = axis, wire, line or Line(), lane

    @property
    def index(self) -> int:
        """This rank's number among the group's ranks."""
        return self.axis.index

    @property
    def size(self) -> int:
        return self.axis.size

    @property
    def is_alone(self) -> bool:
        """Whether this rank is the only one."""
        return self.axis.is_alone

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.axis.index == 0

    def begin(
        self,
        op: str,
        tensor: Tensor | None,
        what: str,
        *,
        sent_bytes: int | None = None,
        counted_as: str | None = None,
    ) -> Flight:
        """Begin a collective of these ranks; see Wire.begin."""
        return self.wire.begin(
            op, tensor, what, sent_bytes=sent_bytes, counted_as=counted_as, lane=self.lane, line=self._line
        )

    def broadcast(self, tensor: Tensor, *, what: str, source: int = 0) -> None:
        """Overwrite `tensor` on every rank with that of rank number `source` among these."""
        axis = self.axis
        if axis.is_alone or tensor.numel() == 0:
            return
        sent_bytes = tensor.nbytes if axis.index == source else 0
        flight = self.begin("broadcast", tensor, what, sent_bytes=sent_bytes)
        send = partial(dist.broadcast, tensor, group=axis.group, async_op=True)
        flight.start(partial(send, group_src=source)).wait()

    def all_gather_float64(self, value: Tensor, *, what: str) -> Tensor:
        """Return every rank's numbers in rank order.

        Shapes: value [] or [k] float64, the result [ranks] or [ranks, k]
        """
        gathered, pending = self.start_all_gather_float64(value, what=what)
        pending.wait()
        return gathered

    def start_all_gather_float64(self, value: Tensor, *, what: str) -> tuple[Tensor, Pending]:
        """Gather, as all_gather_float64; the numbers are there when the pending one has ended."""
        if self.axis.is_alone:
            return value.unsqueeze(0), Pending.done()
        gathered = value.new_empty(self.axis.size, *value.shape)
        return gathered, Pending(self._all_gather_steps(value, gathered, what))

    def all_gather_numbers(
        self, numbers: Sequence[float], *, device: torch.device, what: str
    ) -> list[list[float]]:
        """Return every rank's numbers in rank order: as many of each, which the host has."""
        return self.start_all_gather_numbers(numbers, device=device, what=what)()

    def start_all_gather_numbers(
        self, numbers: Sequence[float], *, device: torch.device, what: str
    ) -> Callable[[], list[list[float]]]:
        """Gather, as all_gather_numbers; the returned function waits for the numbers. On a GPU they are sent
        in a stream of their own: the host waits for the other ranks, and for what they have sent each
        other before, but not for what the GPU computes.
        """
        if self.is_alone:
            own = [float(one) for one in numbers]
            return lambda: [own]
        with aside(device):
            sent = on_device(numbers, dtype=torch.float64, device=device)
            gathered, pending = self.start_all_gather_float64(sent, what=what)
            if gathered.is_cuda:
                pending.wait()
            read_back = ReadBack(gathered)

        def wait() -> list[list[float]]:
            pending.wait()
            with self.wire.recorder.waiting_for_device() if gathered.is_cuda else nullcontext():
                numbers: list[list[float]] = read_back.wait().tolist()
            return numbers

        return wait

    def gather_objects(self, value: object, *, what: str) -> list[Any] | None:
        """Return every rank's `value` on the first, in rank order, None elsewhere.

        For small values, seldom.
        """
        axis = self.axis
        if axis.is_alone:
            return [value]
        gathered: list[Any] | None = [None] * axis.size if self.is_first else None
        self.begin("gather", None, what).run(
            partial(dist.gather_object, value, gathered, group_dst=0, group=axis.group)
        )
        return gathered

    def all_gather_objects(self, value: object, *, what: str) -> list[Any]:
        """Return every rank's `value` on every rank, in rank order. For small values, seldom."""
        axis = self.axis
        if axis.is_alone:
            return [value]
        gathered: list[Any] = [None] * axis.size
        self.begin("all_gather", None, what).run(
            partial(dist.all_gather_object, gathered, value, group=axis.group)
        )
        return gathered

    def _all_gather_steps(self, value: Tensor, gathered: Tensor, what: str) -> Steps:
        sent_bytes = (self.axis.size - 1) * value.nbytes
        flight = self.begin("all_gather", gathered, what, sent_bytes=sent_bytes, counted_as="scalar")
        send = partial(all_gather_single, gathered.view(-1), value.view(-1), async_op=True)
        yield flight.start(partial(send, group=self.axis.group))


class Job(RankGroup):
    """All ranks of the job, whatever each of them holds: an error on one rank fails all, by name.

    Ranks that train the same parameters with other data have the same leader, the first of them: they do the
    same collectives in the same order, and hold the same model.
    """

    def __init__(
        self, wire: Wire, *, leaders: Sequence[int] | None = None, places: Sequence[str] = ()
    ) -> None:
        """`leaders` are by rank; default, all train the same. `places`, too: where each is along the axes of
        the job, in words.
        """
        size = dist.get_world_size()
        super().__init__(Axis(size=size, index=dist.get_rank(), group=None), wire)
        self.leaders = tuple(leaders or (0,) * size)
        self.names = RankNames(places)
        if len(set(self.leaders)) > 1:
            self.lane = JOB_LANE

    @property
    def peers(self) -> tuple[int, ...]:
        """Return the ranks that train the same parameters as this one, in order."""
        own = self.leaders[self.index]
        return tuple(rank for rank, leader in enumerate(self.leaders) if leader == own)

    def of_peers(self, values: Sequence[T]) -> list[T]:
        """Return of all ranks' values those of the ranks that train what this one does, in rank order."""
        return [values[rank] for rank in self.peers]

    def first_difference(self, values: Sequence[object]) -> tuple[int, int] | None:
        """Return the first rank whose value is not that of its leader, and the leader; the same on all."""
        for rank, (value, leader) in enumerate(zip(values, self.leaders, strict=True)):
            if value != values[leader]:
                return rank, leader
        return None
