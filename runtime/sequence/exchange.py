"""Messages between the ranks along the axis sp: parts of tensors, along one dimension or another.

Source: Jacobs et al. 2023 (DeepSpeed-Ulysses), section 3
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ..comm.flight_recorder import DATA_LANE, Line
from ..errors import ConfigError
from ..mesh.current import current_wire
from ..zero.parameters.uncompiled import uncompiled

Sizes = tuple[int, ...]  # sizes by rank
Shape = Sequence[int]

_resolve: Callable[[Any], Any] = vars(distributed_c10d)["_resolve_process_group"]  # torch has no public name


@dataclass(slots=True)
class Traffic:
    """Amounts that this process has sent along the axis sp, counted over all engines and attentions."""

    num_sent: int = 0


TRAFFIC = Traffic()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRanks:
    """The ranks that have the parts of one sequence, in the order of the parts. This object does not keep
    their process group alive: a group that lives until the interpreter ends may crash the process.

    Order: all of them call the same methods in the same order, in forward and backward
    """

    name: str  # name of the process group; after destroy_process_group() a new group may get the same name
    made: weakref.ref[Any] = field(repr=False, compare=False)  # the group that was made
    size: int
    index: int  # this rank's index
    line: Line  # the line's ranks in the job

    @classmethod
    def of(cls, group: Any) -> SequenceRanks:
        """Return the ranks of a process group."""
        size, index = dist.get_world_size(group), dist.get_rank(group)
        line = Line("sp", tuple(dist.get_process_group_ranks(group)))
        return cls(name=group.group_name, made=weakref.ref(group), size=size, index=index, line=line)

    @property
    def group(self) -> Any:
        """Return the process group.

        Errors: ConfigError after destroy_process_group()
        """
        try:
            group = _resolve(self.name)
        except RuntimeError:
            group = None
        if group is None or group is not self.made():
            raise ConfigError(
                "the process group of the ranks that share a sequence is gone; register the attention anew "
                "after init_distributed(), or call unregister_from_transformers()"
            )
        return group

    def even(self, total: int) -> Sizes:
        """Return the sizes of the ranks' parts of `total` elements, the larger ones first."""
        return tuple(total // self.size + (index < total % self.size) for index in range(self.size))

    def sum(self, value: Tensor, what: str) -> Tensor:
        """Return the sum over the ranks, without a gradient."""
        total = value.detach().clone()
        sent = 2 * total.nbytes // self.size * (self.size - 1)
        self._send("all_reduce", total, what, sent, partial(dist.all_reduce, total))
        return total

    def gather(self, value: Tensor, what: str) -> list[Tensor]:
        """Return every rank's value, without a gradient; shapes must be equal."""
        sent = value.detach().contiguous()
        received = [torch.empty_like(sent) for _ in range(self.size)]
        sent_bytes = sent.nbytes * (self.size - 1)
        self._send("all_gather", sent, what, sent_bytes, partial(dist.all_gather, received, sent))
        return received

    def gather_objects(self, value: object, what: str) -> list[Any]:
        """Return every rank's value. For small objects."""
        received: list[Any] = [None] * self.size
        send = partial(dist.all_gather_object, received, value, group=self.group)
        wire = current_wire()
        if wire is None:
            send()
        else:
            wire.begin("all_gather", None, what, lane=DATA_LANE, line=self.line).run(send)
        return received

    def send_parts(
        self, parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Shape]], what: str
    ) -> list[list[Tensor]]:
        """Send parts i to rank i, in one message, and return what each rank has sent here, in these shapes.
        Parts are copied once before they are sent; the returned tensors are views of one buffer.

        Errors: AssertionError for parts of several dtypes
        """
        every = [part for of_rank in parts for part in of_rank]
        if len({part.dtype for part in every}) != 1:
            raise AssertionError(f"{what} of several dtypes: {[part.dtype for part in every]}")
        sent = every[0].new_empty(sum(part.numel() for part in every))
        for run, part in zip(torch.split(sent, [part.numel() for part in every]), every, strict=True):
            run.view(part.shape).copy_(part)
        sizes = [sum(prod(shape) for shape in of_rank) for of_rank in shapes]
        sent_sizes = [sum(part.numel() for part in of_rank) for of_rank in parts]
        received = sent.new_empty(sum(sizes))
        sent_bytes = sent.nbytes - sent_sizes[self.index] * sent.element_size()
        self._send(
            "all_to_all",
            None,  # ranks may send different amounts
            what,
            sent_bytes,
            partial(dist.all_to_all_single, received, sent, sizes, sent_sizes),
        )
        return [
            [
                one.view(tuple(shape))
                for one, shape in zip(
                    torch.split(run, [prod(shape) for shape in of_rank]), of_rank, strict=True
                )
            ]
            for run, of_rank in zip(torch.split(received, sizes), shapes, strict=True)
        ]

    def _send(
        self,
        op: str,
        tensor: Tensor | None,
        what: str,
        sent_bytes: int,
        send: Callable[..., dist.Work | None],
    ) -> None:
        """Send through the current engine, so that its counters and its watchdog see the collective."""
        TRAFFIC.num_sent += 1
        wire, start = current_wire(), partial(send, group=self.group, async_op=True)
        if wire is not None:
            flight = wire.begin(op, tensor, what, sent_bytes=sent_bytes, lane=DATA_LANE, line=self.line)
            flight.start(start).wait()
        elif (work := start()) is not None:
            work.wait()


class DimExchange(NamedTuple):
    """A dimension that is cut over the ranks and one whose parts are joined, with the sizes of
    their parts.
    """

    scatter: tuple[int, Sizes]
    gather: tuple[int, Sizes]

    @property
    def undone(self) -> DimExchange:
        """Return the exchange that undoes this one."""
        return DimExchange(self.gather, self.scatter)


@uncompiled
def exchange(
    values: Sequence[Tensor], ranks: SequenceRanks, cuts: Sequence[DimExchange], what: str
) -> list[Tensor]:
    """Cut a dimension of each value over the ranks, join the parts of another one, and return the values.
    They go in one message if they have one dtype. Gradients are exchanged the opposite way.

    Shapes: along the dimension to cut, a value has the sum of the sizes; along the one to join, this rank's
    size
    Errors: ConfigError for a value with another shape
    """
    for value, (scatter, gather) in zip(values, cuts, strict=True):
        given = value.shape[scatter[0]], value.shape[gather[0]]
        if given != (sum(scatter[1]), gather[1][ranks.index]):
            raise ConfigError(
                f"{what} of shape {tuple(value.shape)}: dimension {scatter[0]} is cut into {scatter[1]} and "
                f"of dimension {gather[0]} this rank has one of the parts {gather[1]}; every rank has to "
                "have the same number of samples, heads and positions"
            )
    if ranks.size == 1:
        return list(values)
    if len({value.dtype for value in values}) > 1:
        return [exchange([value], ranks, [cut], what)[0] for value, cut in zip(values, cuts, strict=True)]
    return list(_Exchange.apply(ranks, tuple(cuts), what, *values))  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ranks: SequenceRanks, cuts: tuple[DimExchange, ...], what: str, *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.cuts, ctx.what = ranks, cuts, what
        parts = [
            torch.split(value, list(cut.scatter[1]), cut.scatter[0])
            for value, cut in zip(values, cuts, strict=True)
        ]
        shapes = [_shapes(value, cut, ranks) for value, cut in zip(values, cuts, strict=True)]
        received = ranks.send_parts(
            list(zip(*parts, strict=True)), list(zip(*shapes, strict=True)), what
        )  # by rank
        return tuple(
            torch.cat(of_value, dim=cut.gather[0])
            for of_value, cut in zip(zip(*received, strict=True), cuts, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        what = ctx.what if ctx.what.startswith("the gradient") else f"the gradient of {ctx.what}"
        back = _Exchange.apply(ctx.ranks, tuple(cut.undone for cut in ctx.cuts), what, *grads)  # type: ignore[no-untyped-call]
        return None, None, None, *back


def _shapes(value: Tensor, cut: DimExchange, ranks: SequenceRanks) -> list[Shape]:
    """Return the shapes of the parts that each rank sends here."""
    shape = list(value.shape)
    (scattered, sizes), (joined, there) = cut
    shape[scattered] = sizes[ranks.index]
    return [(*shape[:joined], size, *shape[joined + 1 :]) for size in there]
