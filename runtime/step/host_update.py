"""Updates of sub-buffers in a thread of their own, while the device computes.

[Note: host update] Such an update does not change the parameters until it is published: the computed
parameters wait in host memory. An update that may be dropped also works on copies of master and states. To
publish it, copies and originals are exchanged; to drop it, the copies are ignored. So there is nothing to
undo.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.captures import ignore_captures
from ..offload.device_copies import bring, to_host
from ..tracing.spans import SPANS
from ..zero.units.sub_buffer import SubBuffer
from .pipeline import Pieces, ReadyShard

UpdateSubBuffer = Callable[[ReadyShard], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Arguments of one optimizer step, for every sub-buffer. Equal objects mean the same step."""

    groups: tuple[Mapping[str, Any], ...]  # the optimizer's, without parameters; they do not change
    step: int  # counted from 1
    grad_scale: float  # gradients are multiplied by it


def make_thread(device: torch.device) -> ThreadPoolExecutor:
    """Return a thread that works for the process that has `device`."""

    def begin(num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # OpenMP keeps this number for each thread
        if device.type == "cuda":
            torch.cuda.set_device(device)  # page-locked memory belongs to a device
            ignore_captures()

    return ThreadPoolExecutor(1, "dslaunch-step", begin, (torch.get_num_threads(),))


class Room:
    """Host memory for a second set of one sub-buffer's master and states; taken at its first use."""

    def __init__(self, sub_buffer: SubBuffer) -> None:
        self._sub_buffer = sub_buffer
        self.master: Tensor | None = None  # [shard] float32
        self.states: dict[str, Tensor] = {}  # [shard] float32 by name

    def fill(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return copies of the master and of the states."""
        self.master = self._copy(self._sub_buffer.optimizer_shard.master, self.master)
        self.states = {
            name: self._copy(state, self.states.get(name))
            for name, state in self._sub_buffer.optimizer_shard.states.items()
        }
        return self.master, dict(self.states)

    def _copy(self, source: Tensor, target: Tensor | None) -> Tensor:
        if target is None:
            return to_host(source, pin_memory=self._sub_buffer.residence.pins_states)
        return target.copy_(source)


class HostUpdate:
    """Update of one sub-buffer, which has its states in host memory. See [Note: host update].

    Without a `room`, master and states are updated in place, except a master that is the parameter itself.
    """

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        sub_buffer: SubBuffer,
        update: UpdateSubBuffer,
        *,
        grads: Callable[[], Pieces],
        room: Room | None,
    ) -> None:
        """Begin as soon as the thread is free; the thread calls `grads`."""
        self._sub_buffer, self._update, self._grads, self._room = sub_buffer, update, grads, room
        self._future: Future[ReadyShard] = thread.submit(self._run)

    def drop(self) -> None:
        """Drop the update, and its error, too. After this call its gradients are not read any more."""
        if not self._future.cancel():
            wait([self._future])

    def publish(self) -> None:
        """Wait for the update, and put its results into the sub-buffer; parameters are not gathered here.

        Errors: what the update raised
        """
        ready, sub_buffer = self._future.result(), self._sub_buffer
        if ready.master is not sub_buffer.optimizer_shard.master:
            if sub_buffer.optimizer_shard.has_separate_master:
                _exchange(ready.master, sub_buffer.optimizer_shard.master)
            else:
                sub_buffer.param_shard.own.copy_(ready.master)
        for name, state in ready.states.items():
            if name not in sub_buffer.optimizer_shard.states:
                sub_buffer.optimizer_shard.states[name] = state
            elif state is not sub_buffer.optimizer_shard.states[name]:
                _exchange(state, sub_buffer.optimizer_shard.states[name])
        if ready.param_out is not None:
            bring(ready.param_out, sub_buffer.param_shard.own)

    @torch.no_grad()
    def _run(self) -> ReadyShard:
        sub_buffer = self._sub_buffer
        if self._room is not None:
            master, states = self._room.fill()
        else:
            master, states = sub_buffer.optimizer_shard.master, sub_buffer.optimizer_shard.states
            if not sub_buffer.optimizer_shard.has_separate_master:
                master = to_host(master, pin_memory=sub_buffer.residence.pins_states)
        ready = ReadyShard(
            sub_buffer=sub_buffer,
            master=master,
            states=states,
            grads=self._grads(),
            param_out=sub_buffer.optimizer_shard.make_param_out(),
        )
        began = time.monotonic_ns() if SPANS.is_on else 0
        self._update(ready)
        if began:
            SPANS.add("update", f"update of {sub_buffer.label}", began)
        return ready


def _exchange(one: Tensor, other: Tensor) -> None:
    """Exchange the contents of two tensors, which stay the same objects, so that all references see it."""
    one.data, other.data = other.data, one.data
