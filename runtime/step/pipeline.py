"""One optimizer step over many shards, some of which have their states in host memory or on a disk.

While one shard is updated, the next shard's states and gradients are read, or its gradients are copied to the
host, and the previous shard's states are written. So host memory has the states of at most three shards and
the gradients of two, and the device waits for the first copies only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..offload.device_copies import Arrival, bring
from ..offload.pinned_memory import host_empty
from ..tracing.spans import SPANS
from ..zero.units.sub_buffer import SubBuffer

Pieces = tuple[tuple[int, Tensor], ...]  # where each piece begins in the shard, and [k] elements


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyShard:
    """Inputs of an optimizer for one sub-buffer, in the memory where the optimizer steps."""

    sub_buffer: SubBuffer
    master: Tensor  # [n] float32; like the states, the sub-buffer's own or a copy that is to replace it
    states: dict[str, Tensor]  # [n] float32 by name
    grads: Pieces  # in the parameters' dtype, or float32; may be overwritten on a GPU
    param_out: Tensor | None  # [n] to be written with the rounded copy; None: the master is the parameter


class StepPipeline:
    """Pipeline of the sub-buffers of one optimizer."""

    def __init__(self, sub_buffers: Sequence[SubBuffer], *, kind: type[Turn] | None = None) -> None:
        """`kind` tells where the optimizer steps; None: where masters and states lie."""
        self._sub_buffers, self._kind = tuple(sub_buffers), kind or Turn

    def run(
        self,
        update: Callable[[ReadyShard], None],
        *,
        after_sub_buffer: Callable[[SubBuffer], None] | None = None,
    ) -> None:
        """Update all sub-buffers; `after_sub_buffer` is called when one's parameters have their new values.

        The last sub-buffer goes first: the norm has just read its gradients, which are still in the cache.
        """
        waiting = [self._kind(sub_buffer) for sub_buffer in reversed(self._sub_buffers)]
        last: Turn | None = None
        for turn, following in zip(waiting, [*waiting, None][1:], strict=True):
            turn.start()
            if following is not None:
                following.start()
            if turn.sub_buffer.optimizer_shard.pending_update is None:
                ready = turn.arrive()
                began = time.monotonic_ns() if SPANS.is_on else 0
                update(ready)
                if began:
                    SPANS.add("update", f"update of {turn.sub_buffer.label}", began)
            turn.publish()
            if after_sub_buffer is not None:
                after_sub_buffer(turn.sub_buffer)
            if last is not None:
                last.end()
            last = turn
        if last is not None:
            last.end()


class Turn:
    """One sub-buffer on its way through a step."""

    def __init__(self, sub_buffer: SubBuffer) -> None:
        self.sub_buffer = sub_buffer
        self._copies: tuple[tuple[int, Tensor, Arrival], ...] = ()
        self._param_out: Tensor | None = None
        self._has_started = False

    def start(self) -> None:
        """Begin to read the sub-buffer's states and to copy its gradients."""
        if not self._has_started and self.sub_buffer.optimizer_shard.pending_update is None:
            self._has_started = True
            self.sub_buffer.start_in()
            self.sub_buffer.gradients.start_in()
            if self.sub_buffer.residence.steps_on_host and not self.sub_buffer.gradients.is_on_host:
                self._copies = tuple((offset, *self._start_copy(grad)) for offset, grad in self._pieces())

    def _pieces(self) -> Iterator[tuple[int, Tensor]]:
        return self.sub_buffer.gradients.pieces(0, self.sub_buffer.optimizer_shard.master.numel())

    def arrive(self) -> ReadyShard:
        """Wait until the shard's states and gradients are here."""
        sub_buffer = self.sub_buffer
        sub_buffer.finish_in()
        for _, _, arrival in self._copies:
            arrival.wait()
        grads = tuple((offset, grad) for offset, grad, _ in self._copies) or tuple(self._pieces())
        param_out = sub_buffer.param_shard.own if sub_buffer.optimizer_shard.has_separate_master else None
        if sub_buffer.residence.is_apart:
            param_out = self._param_out = sub_buffer.optimizer_shard.make_param_out()
        return ReadyShard(
            sub_buffer=sub_buffer,
            master=sub_buffer.optimizer_shard.master,
            states=sub_buffer.optimizer_shard.states,
            grads=grads,
            param_out=param_out,
        )

    def publish(self) -> None:
        """Begin to copy the parameters to the memory where they are kept, and to write states to the disk."""
        pending_update, self.sub_buffer.optimizer_shard.pending_update = (
            self.sub_buffer.optimizer_shard.pending_update,
            None,
        )
        if pending_update is not None:
            pending_update.publish()
            return
        if self._param_out is not None:
            bring(self._param_out, self.sub_buffer.param_shard.own)
        self._copies, self._param_out = (), None
        self.sub_buffer.gradients.let_go()
        self.sub_buffer.start_out()

    def end(self) -> None:
        """Wait until the states are written, and give their memory back."""
        self.sub_buffer.finish_out()

    def _start_copy(self, grad: Tensor) -> tuple[Tensor, Arrival]:
        host = host_empty((grad.numel(),), grad.dtype, pin_memory=self.sub_buffer.residence.pins_states)
        return host, Arrival(grad, host)
