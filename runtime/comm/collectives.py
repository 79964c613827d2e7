"""Collectives on flat buffers, in place, counted, and the same for gloo and NCCL.

How gloo reduces
----------------
gloo has no reduce_scatter: torch emulates it with a clone and an all_reduce, at twice the bytes. Here each
rank sends every other rank its chunk (see direct.py) and adds what it gets in rank order, in fp32 whatever
the dtype, then rounds once. The bytes are those of a true reduce_scatter, and the result depends on
nothing but the ranks' values. An all_reduce is that plus an all_gather, so a buffer reduced along either
axis gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .direct import Scratch, send_chunks, send_to_all
from .flight_recorder import PARAMETER_LANE, Flight, Line
from .mesh import Axis, Mesh
from .pending import Pending, Steps
from .rank_group import RankGroup, all_gather_single
from .wire import Wire

# torch 2.13 renamed it and deprecated the old name.
reduce_scatter_single: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class Collectives:
    """The collectives of the ranks that share parameters. An axis of one rank costs nothing: no message and
    no copy.

    `what` says what is sent, so that a hang or a difference between ranks can be told: "unit 'blocks.3'".
    Order: all ranks of an axis must call the same methods in the same order
    """

    def __init__(
        self,
        mesh: Mesh,
        wire: Wire | None = None,
        *,
        gather_axis: Axis | None = None,
        line: Line = Line(),  # noqa: B008  (it cannot change)
    ) -> None:
        """`wire` is the engine's, which has other collectives, too; default, these are all. `line` tells of
        ranks that do not all have the same model which they are.

        `gather_axis` is the shard axis once more: what all_gather_from()
        sends goes beside the rest, in its own order.
        """
        self.mesh = mesh
        self.wire = Wire() if wire is None else wire
        self._line = line
        self.sharers = RankGroup(mesh.sharers, self.wire, line=line)
        self._own_gather_axis = gather_axis
        self._scratch = Scratch()

    def forget_buffers(self) -> None:
        """Free what reductions have received into; the next one makes it anew."""
        self._scratch.forget()

    def gather_beside(self, gather_axis: Axis) -> None:
        """Let what all_gather_from() sends go along this axis from now on; see the constructor."""
        self._own_gather_axis = gather_axis

    def close(self) -> None:
        """Give up the process groups of these ranks; nothing can be sent from then on."""
        if self._own_gather_axis is not None:
            self._own_gather_axis = self._own_gather_axis.without_group()
        self.mesh = self.mesh.without_groups()
        self.sharers = RankGroup(self.mesh.sharers, self.wire, line=self._line)

    def reduce_scatter_or_all_reduce(self, flat: Tensor, *, what: str) -> Pending:
        """Average `flat` over the sharers, or divide their sum by the mesh's divisor; only what this rank
        holds of gradients is meaningful afterwards.

        Shapes: [n] contiguous, n a multiple of the number of sharers
        """
        return Pending(self._reduce_steps(flat, what))

    def all_gather_(self, flat: Tensor, *, what: str) -> Pending:
        """Fill `flat` from the shards that the ranks of the shard axis hold in their places of it."""
        return Pending(self._all_gather_steps(flat, self.mesh.shard, what))

    def all_gather_from(self, shard: Tensor, flat: Tensor, *, what: str) -> Pending:
        """Fill `flat` [n] with the `shard` [n/N] of every rank of the shard axis, in order."""
        return Pending(self._all_gather_from_steps(shard, flat, what))

    def gather_states(self, own: Tensor, *, what: str) -> Tensor:
        """Return the whole of a value of which each rank has its shard, as of gradients,
        masters and states.
        """
        mesh = self.mesh
        for axis in (mesh.replicate, mesh.shard) if mesh.states_by_chunk else (mesh.shard,):
            if not axis.is_alone:
                whole = own.new_empty(axis.size * own.numel())
                flight = self._begin("all_gather", whole, what, sent_bytes=_ring_bytes(whole, axis))
                _start_gather(flight, own, whole, axis).wait()
                own = whole
        return own

    def all_gather_chunk(self, shard: Tensor, *, what: str) -> Pending:
        """Fill this rank's parameter shard from the chunks of it that the ranks of the replicate
        axis have updated.
        """
        if not self.mesh.states_by_chunk:
            return Pending.done()
        return Pending(self._all_gather_steps(shard, self.mesh.replicate, what))

    def broadcast(self, tensor: Tensor, *, what: str, source: int = 0) -> None:
        """Overwrite `tensor` on every sharer with that of sharer `source`, and where others hold copies of
        it, with the first copy.
        """
        if tensor.itemsize == 1:
            tensor = tensor.view(torch.uint8)  # NCCL and gloo know no floats of 8 bits
        self.sharers.broadcast(tensor, what=what, source=source)
        RankGroup(self.mesh.copies, self.wire).broadcast(tensor, what=what)

    def exchange(self, buffer: Tensor, *, sent: Sequence[int], received: Sequence[int], what: str) -> Tensor:
        """Return what the ranks that share the states have for this one, in the order of `Mesh.states_axis`.

        Shapes: [sum of `sent`] and [sum of `received`] elements, one count for each rank
        """
        axis = self.mesh.states_axis
        sent_bytes = (buffer.numel() - sent[axis.index]) * buffer.itemsize
        flight = self._begin(
            "all_to_all", None, what, sent_bytes=sent_bytes
        )  # None: each rank's size is another
        arrived = buffer.new_empty(sum(received))
        send = partial(dist.all_to_all_single, arrived, buffer, list(received), list(sent))
        flight.start(partial(send, group=axis.group, async_op=True)).wait()
        return arrived

    def _begin(
        self,
        op: str,
        tensor: Tensor | None,
        what: str,
        *,
        sent_bytes: int,
        counted_as: str | None = None,
        lane: int = 0,
    ) -> Flight:
        return self.wire.begin(
            op, tensor, what, sent_bytes=sent_bytes, counted_as=counted_as, lane=lane, line=self._line
        )

    def _reduce_steps(self, flat: Tensor, what: str) -> Steps:
        mesh = self.mesh
        shard, replicate, rescale = mesh.shard, mesh.replicate, mesh.rescale
        own = _chunk(flat, shard)
        yield from self._reduce_scatter_steps(flat, shard, what, rescale)
        rest = rescale if shard.is_alone else 1.0
        if replicate.is_alone:
            if rest != 1.0:
                own.mul_(rest)
            return
        steps = self._reduce_scatter_steps if mesh.states_by_chunk else self._all_reduce_steps
        yield from steps(own, replicate, what, rest)

    def _all_reduce_steps(self, flat: Tensor, axis: Axis, what: str, rescale: float) -> Steps:
        if axis.is_alone:
            return
        if _is_native(flat):
            flight = self._begin("all_reduce", flat, what, sent_bytes=2 * _ring_bytes(flat, axis))
            average = dist.ReduceOp.AVG
            yield flight.start(partial(dist.all_reduce, flat, op=average, group=axis.group, async_op=True))
            if rescale != 1.0:
                flat.mul_(rescale)
            return
        yield from self._reduce_scatter_steps(flat, axis, what, rescale)
        yield from self._all_gather_steps(flat, axis, what)

    def _reduce_scatter_steps(self, flat: Tensor, axis: Axis, what: str, rescale: float) -> Steps:
        if axis.is_alone:
            return
        flight = self._begin("reduce_scatter", flat, what, sent_bytes=_ring_bytes(flat, axis))
        own = _chunk(flat, axis)
        if _is_native(flat):
            average = dist.ReduceOp.AVG
            yield flight.start(
                partial(reduce_scatter_single, own, flat, op=average, group=axis.group, async_op=True)
            )
            if rescale != 1.0:
                own.mul_(rescale)
            return
        # See "How gloo reduces" above.
        received = self._scratch.take(flat.numel() - own.numel(), like=flat)
        yield flight.start(partial(send_chunks, flat, received, axis, lane=flight.label.lane))
        first, *rest = _in_rank_order(own, received, axis)
        total = first.float()  # a view if that is fp32, of memory that is needed no more
        for chunk in rest:
            total.add_(chunk)
        own.copy_(total.mul_(rescale / axis.size))
        self._scratch.give_back(received)

    def _all_gather_steps(self, flat: Tensor, axis: Axis, what: str) -> Steps:
        if axis.is_alone:
            return
        flight = self._begin("all_gather", flat, what, sent_bytes=_ring_bytes(flat, axis))
        yield _start_gather(flight, _chunk(flat, axis), flat, axis)

    def _all_gather_from_steps(self, shard: Tensor, flat: Tensor, what: str) -> Steps:
        axis = self._own_gather_axis or self.mesh.shard
        flight = self._begin(
            "all_gather",
            flat,
            what,
            sent_bytes=_ring_bytes(flat, axis),
            counted_as="parameters",
            lane=PARAMETER_LANE,
        )
        yield _start_gather(flight, shard, flat, axis)


def _start_gather(flight: Flight, own: Tensor, flat: Tensor, axis: Axis) -> Flight:
    """Begin to fill `flat` with the `own` chunk of every rank."""
    if _is_native(flat):
        return flight.start(partial(all_gather_single, flat, own, group=axis.group, async_op=True))
    return flight.start(partial(send_to_all, own, flat, axis, lane=flight.label.lane))


def _in_rank_order(own: Tensor, received: Tensor, axis: Axis) -> list[Tensor]:
    chunks = list(received.chunk(axis.size - 1))
    return [*chunks[: axis.index], own, *chunks[axis.index :]]


def _is_native(flat: Tensor) -> bool:
    """Whether the backend of the tensor's device reduces by itself: NCCL does,
    gloo does not (see the title).
    """
    return flat.is_cuda


def _chunk(flat: Tensor, axis: Axis) -> Tensor:
    size = flat.numel() // axis.size
    return flat[axis.index * size : (axis.index + 1) * size]


def _ring_bytes(flat: Tensor, axis: Axis) -> int:
    return flat.nbytes // axis.size * (axis.size - 1)
