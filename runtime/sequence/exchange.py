"""What the ranks along the axis sp send each other: parts of tensors, along one dimension or another.

Source: Jacobs et al. 2023 (DeepSpeed-Ulysses), section 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ..errors import ConfigError
from ..mesh.current import current_wire
from ..zero.uncompiled import uncompiled

Sizes = tuple[int, ...]  # by rank

_resolve: Callable[[Any], Any] = vars(distributed_c10d)["_resolve_process_group"]  # torch has no public name


@dataclass(slots=True)
class Traffic:
    """What this process has sent along sequences, whatever engine or attention it was for."""

    num_sent: int = 0


TRAFFIC = Traffic()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRanks:
    """The ranks that have the parts of one sequence, in the order of the parts. It holds no process group,
    but
    its name: a group that is alive at the end of the interpreter may take the process with it.

    Order: all of them call the same methods in the same order, in forward and backward
    """

    name: str  # of the process group
    size: int
    index: int  # of this rank

    @classmethod
    def of(cls, group: Any) -> SequenceRanks:
        """Return those of a process group."""
        return cls(name=group.group_name, size=dist.get_world_size(group), index=dist.get_rank(group))

    @property
    def group(self) -> Any:
        """Return the process group.

        Errors: ConfigError after destroy_process_group()
        """
        try:
            return _resolve(self.name)
        except RuntimeError as error:
            raise ConfigError(
                "the process group of the ranks that share a sequence is gone; register the attention anew "
                "after init_distributed(), or call unregister_from_transformers()"
            ) from error

    def even(self, total: int) -> Sizes:
        """Return the sizes of the parts of so many, the larger ones first."""
        return tuple(total // self.size + (index < total % self.size) for index in range(self.size))

    def sum(self, value: Tensor, what: str) -> Tensor:
        """Return the sum over the ranks, without a gradient."""
        total = value.detach().clone()
        sent = 2 * total.nbytes // self.size * (self.size - 1)
        self._send("all_reduce", total, what, sent, partial(dist.all_reduce, total))
        return total

    def gather(self, value: Tensor, what: str) -> list[Tensor]:
        """Return what every rank has, of equal shapes, without a gradient."""
        sent = value.detach().contiguous()
        received = [torch.empty_like(sent) for _ in range(self.size)]
        sent_bytes = sent.nbytes * (self.size - 1)
        # None: the ranks that have other samples may have longer sequences
        self._send("all_gather", None, what, sent_bytes, partial(dist.all_gather, received, sent))
        return received

    def gather_objects(self, value: object, what: str) -> list[Any]:
        """Return what every rank has. For small objects."""
        received: list[Any] = [None] * self.size
        send = partial(dist.all_gather_object, received, value, group=self.group)
        wire = current_wire()
        if wire is None:
            send()
        else:
            wire.begin("all_gather", None, what).run(send)
        return received

    def send_parts(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], what: str) -> list[Tensor]:
        """Send part i to rank i, and return what each rank has sent here, of these shapes. One copy on the
        way
        out; what is returned are views of one buffer.
        """
        sent = torch.cat([part.reshape(-1) for part in parts])
        sizes = [prod(shape) for shape in shapes]
        received = sent.new_empty(sum(sizes))
        sent_bytes = sent.nbytes - parts[self.index].numel() * sent.element_size()
        self._send(
            "all_to_all",
            None,  # ranks may send different amounts
            what,
            sent_bytes,
            partial(dist.all_to_all_single, received, sent, sizes, [part.numel() for part in parts]),
        )
        return [
            one.view(tuple(shape)) for one, shape in zip(torch.split(received, sizes), shapes, strict=True)
        ]

    def _send(
        self,
        op: str,
        tensor: Tensor | None,
        what: str,
        sent_bytes: int,
        send: Callable[..., dist.Work | None],
    ) -> None:
        """Let the engine that there is count it, and its watchdog wait for it."""
        TRAFFIC.num_sent += 1
        wire, start = current_wire(), partial(send, group=self.group, async_op=True)
        if wire is not None:
            wire.begin(op, tensor, what, sent_bytes=sent_bytes).start(start).wait()
        elif (work := start()) is not None:
            work.wait()


@uncompiled
def exchange(
    value: Tensor, ranks: SequenceRanks, *, scatter: tuple[int, Sizes], gather: tuple[int, Sizes], what: str
) -> Tensor:
    """Cut a dimension over the ranks, and put another one together, each given with the sizes of the ranks'
    parts.
    The gradient goes the way back.

    Shapes: `value` has the sum of the sizes along the first dimension, and this rank's size along the second
    Errors: ConfigError for another shape
    """
    given = value.shape[scatter[0]], value.shape[gather[0]]
    if given != (sum(scatter[1]), gather[1][ranks.index]):
        raise ConfigError(
            f"{what} of shape {tuple(value.shape)}: dimension {scatter[0]} is cut into {scatter[1]} and of "
            f"dimension {gather[0]} this rank has one of the parts {gather[1]}; every rank has to have the "
            "same number of samples, heads and positions"
        )
    if ranks.size == 1:
        return value
    result: Tensor = _Exchange.apply(value, ranks, scatter, gather, what)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        ranks: SequenceRanks,
        scatter: tuple[int, Sizes],
        gather: tuple[int, Sizes],
        what: str,
    ) -> Tensor:
        ctx.ranks, ctx.scatter, ctx.gather, ctx.what = ranks, scatter, gather, what
        (cut, sizes), (joined, there) = scatter, gather
        shape = list(value.shape)
        shape[cut] = sizes[ranks.index]
        shapes = [[*shape[:joined], size, *shape[joined + 1 :]] for size in there]
        starts = accumulate(sizes, initial=0)
        parts = [value.narrow(cut, start, size) for start, size in zip(starts, sizes, strict=False)]
        return torch.cat(ranks.send_parts(parts, shapes, what), dim=joined)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        what = ctx.what if ctx.what.startswith("the gradient") else f"the gradient of {ctx.what}"
        back: Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
            grad, ctx.ranks, ctx.gather, ctx.scatter, what
        )
        return back, None, None, None, None
