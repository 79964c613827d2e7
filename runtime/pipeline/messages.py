"""Messages between the ranks of a pipeline: tensors, from one rank to another, in an order that both know."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.flight_recorder import RECEIVE_LANE, SEND_LANE, Flight, Line
from ..comm.messages import Messages
from ..comm.numbers import on_device
from ..comm.wire import Wire
from .neighbours import Neighbour


class Described(NamedTuple):
    """Description of a tensor that has not arrived yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_grad: bool  # its gradient is sent back

    def __str__(self) -> str:
        said = f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"
        may_have = self.dtype.is_floating_point or self.dtype.is_complex
        return f"{said} without a gradient" if may_have and not self.wants_grad else said


class Contents(NamedTuple):
    """Description of the values that one stage hands to the next, known before they arrive."""

    is_tuple: bool  # False: one tensor
    tensors: tuple[Described, ...]

    def __str__(self) -> str:
        said = ", ".join(map(str, self.tensors))
        return f"({said})" if self.is_tuple else said

    def to_bytes(self) -> bytes:
        """Return the contents in the form in which they are sent."""
        tensors = [[one.shape, str(one.dtype).removeprefix("torch."), one.wants_grad] for one in self.tensors]
        return json.dumps([self.is_tuple, tensors]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Contents:
        """Read the form of `to_bytes`."""
        is_tuple, tensors = json.loads(data)
        return cls(
            is_tuple,
            tuple(Described(tuple(shape), getattr(torch, name), wants) for shape, name, wants in tensors),
        )


class IncomingMessage:
    """A message that is on its way here."""

    def __init__(self, contents: Contents, tensors: Sequence[Tensor], flight: Flight) -> None:
        self.contents, self._tensors, self._flight = contents, tuple(tensors), flight

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the message, and return its tensors."""
        self._flight.wait()
        return self._tensors


class _Sent(NamedTuple):
    """A message that may be under way, and its tensors, whose memory is in use until it has arrived."""

    what: str
    flight: Flight
    parts: Sequence[Tensor]


class Post:
    """This rank's messages to and from other ranks of the pipeline, which are named by their places."""

    def __init__(
        self,
        neighbours: Mapping[int, Neighbour],
        wire: Wire,
        device: torch.device,
        *,
        place: int,
        ranks: Sequence[int],
    ) -> None:
        """`neighbours` are given by their places; `place` is this rank's; `ranks` maps a place to the rank in
        the job.
        """
        self._neighbours, self._wire, self._device = neighbours, wire, device
        self._place, self._ranks = place, tuple(ranks)
        self._under_way: list[_Sent] = []

    def send(self, place: int, tensors: Sequence[Tensor], *, contents: Contents | None, what: str) -> None:
        """Begin to send tensors; `contents` are sent first if the receiver does not know them yet."""
        raw = [_raw(tensor) for tensor in tensors]
        flight = self._begin("send", what, place, sent_bytes=sum(one.nbytes for one in raw))
        parts = [*self._header(contents), *raw]
        axis = self._neighbours[place].to
        to = partial(dist.isend, group=axis.group, group_dst=1 - axis.index)
        sends = [partial(to, one) for one in parts if one.numel()]
        flight.start(self._started(sends))
        self._under_way = [one for one in self._under_way if not one.flight.is_over]
        self._under_way.append(_Sent(what, flight, parts))

    def receive(self, place: int, contents: Contents | None, *, what: str) -> IncomingMessage:
        """Begin to receive tensors with these contents; None: first wait until the contents arrive."""
        axis = self._neighbours[place].of
        fetch = partial(dist.irecv, group=axis.group, group_src=1 - axis.index)
        flight = self._begin("receive", what, place)
        if contents is None:
            contents = flight.begin_with(partial(self._told_contents, fetch))
        tensors = [torch.empty(one.shape, dtype=one.dtype, device=self._device) for one in contents.tensors]
        receives = [partial(fetch, _raw(one)) for one in tensors if one.numel()]
        return IncomingMessage(contents, tensors, flight.start(self._started(receives)))

    def finish(self, messages: Collection[str] | None = None) -> None:
        """Wait until these messages are sent, by what they were called, or all, and let go of their memory.

        A GPU's host does not know by itself that a message has arrived: it is ahead of the GPU.
        """
        left: list[_Sent] = []
        for one in self._under_way:
            if messages is None or one.what in messages:
                one.flight.wait()
            else:
                left.append(one)
        self._under_way = left

    def _started(self, starts: Sequence[Callable[[], Any]]) -> Callable[[], Messages]:
        return partial(Messages, starts, tells_its_end=self._device.type != "cpu")

    def _begin(self, op: str, what: str, place: int, *, sent_bytes: int = 0) -> Flight:
        # The size is left out: micro batches of other ranks with the same layers may have other shapes.
        own, other = self._ranks[self._place], self._ranks[place]
        lane, line = (SEND_LANE, (own, other)) if op == "send" else (RECEIVE_LANE, (other, own))
        return self._wire.begin(op, None, what, sent_bytes=sent_bytes, lane=lane, line=Line("", line))

    def _told_contents(self, fetch: Callable[[Tensor], Any]) -> Contents:
        length = torch.empty(1, dtype=torch.int64, device=self._device)
        fetch(length.view(torch.uint8)).wait()
        data = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        fetch(data).wait()
        return Contents.from_bytes(bytes(data.tolist()))

    def _header(self, contents: Contents | None) -> list[Tensor]:
        if contents is None:
            return []
        data = on_device(list(contents.to_bytes()), dtype=torch.uint8, device=self._device)
        length = on_device([data.numel()], dtype=torch.int64, device=self._device)
        return [length.view(torch.uint8), data]


def _raw(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes: NCCL knows fewer types than torch."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
