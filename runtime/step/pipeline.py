"""One optimizer step over many shards, of which some have their states in host memory or on a disk.

While one shard is updated, the next one's states and gradients are read, or its gradients copied to the host,
and the last one's states are written. So the states of three shards at most are in host memory, the gradients
of two, and the device waits for the first copies only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..offload.device_copies import Arrival
from ..zero.sub_buffer import SubBuffer

Pieces = tuple[tuple[int, Tensor], ...]  # where each begins in the shard, and [k] elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What an optimizer needs of one sub-buffer, in the memory where it steps."""

    part: SubBuffer
    master: Tensor  # [n] float32; its own, or what is to take that one's place, as the next
    states: dict[str, Tensor]  # [n] float32 by name
    grads: Pieces  # of the parameters' dtype, or float32; may be overwritten where they are on a GPU
    param_out: Tensor | None  # [n] to be written with the rounded copy; None: the master is the parameter


class StepPipeline:
    """Of the sub-buffers of one optimizer."""

    def __init__(self, parts: Sequence[SubBuffer]) -> None:
        self._parts = tuple(parts)

    def run(
        self, update: Callable[[Ready], None], *, after_part: Callable[[SubBuffer], None] | None = None
    ) -> None:
        """Update all; `after_part` is called when a sub-buffer's parameters have their new values.

        The last one goes first: the norm has read its gradients just before, and they are still in the cache.
        """
        waiting = [_Turn(part) for part in reversed(self._parts)]
        last: _Turn | None = None
        for turn, following in zip(waiting, (*waiting[1:], None), strict=True):
            turn.start()
            if following is not None:
                following.start()
            if turn.part.optimizer_shard.made_aside is None:
                update(turn.arrive())
            turn.publish()
            if after_part is not None:
                after_part(turn.part)
            if last is not None:
                last.end()
            last = turn
        if last is not None:
            last.end()


class _Turn:
    """One sub-buffer on its way through a step."""

    def __init__(self, part: SubBuffer) -> None:
        self.part = part
        self._copies: tuple[tuple[int, Tensor, Arrival], ...] = ()
        self._param_out: Tensor | None = None
        self._has_started = False

    def start(self) -> None:
        """Have its states read, and its gradients copied."""
        if not self._has_started and self.part.optimizer_shard.made_aside is None:
            self._has_started = True
            self.part.start_in()
            self.part.gradients.start_in()
            if self.part.home.steps_on_host and not self.part.gradients.is_on_host:
                self._copies = tuple((offset, *self._start_copy(grad)) for offset, grad in self._pieces())

    def _pieces(self) -> Iterator[tuple[int, Tensor]]:
        return self.part.gradients.pieces(0, self.part.optimizer_shard.master.numel())

    def arrive(self) -> Ready:
        """Wait until they are here."""
        part = self.part
        part.finish_in()
        for _, _, arrival in self._copies:
            arrival.wait()
        grads = tuple((offset, grad) for offset, grad, _ in self._copies) or tuple(self._pieces())
        param_out = part.param_shard.own if part.optimizer_shard.has_separate_master else None
        if part.home.is_apart:
            param_out = self._param_out = part.optimizer_shard.make_param_out()
        return Ready(
            part=part,
            master=part.optimizer_shard.master,
            states=part.optimizer_shard.states,
            grads=grads,
            param_out=param_out,
        )

    def publish(self) -> None:
        """Begin to bring the parameters to where they are kept, and to write what lies on a disk."""
        made_aside, self.part.optimizer_shard.made_aside = self.part.optimizer_shard.made_aside, None
        if made_aside is not None:
            made_aside.publish()
            return
        if self._param_out is not None:
            # torch gives pinned memory to no other tensor before a copy from it is done.
            self.part.param_shard.own.copy_(self._param_out, non_blocking=not self.part.home.params_on_host)
        self._copies, self._param_out = (), None
        self.part.gradients.let_go()
        self.part.start_out()

    def end(self) -> None:
        """Wait until it is written, and give its memory back."""
        self.part.finish_out()

    def _start_copy(self, grad: Tensor) -> tuple[Tensor, Arrival]:
        host = torch.empty(grad.numel(), dtype=grad.dtype, pin_memory=self.part.home.pins_states)
        return host, Arrival(grad, host)
