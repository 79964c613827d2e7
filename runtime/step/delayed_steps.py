"""Delayed steps: a step runs during the next forward and backward, which use the parameters from before it.

Source: ZeRO-Offload (arXiv 2101.06840) section 5.2, "one-step delayed parameter update"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ..errors import ConfigError
from ..zero.access.prefetch import in_backward
from ..zero.model.sharded_model import ShardedModel
from ..zero.units.sub_buffer import SubBuffer
from .host_update import HostUpdate, Update, UpdateSubBuffer, make_thread
from .pipeline import Pieces
from .step_schedule import StepSchedule


class DelayedSteps(StepSchedule):
    """Delayed steps of sub-buffers that all have their gradients and states in host memory.

    A call that reads or changes parameters, masters or states from outside has to `drain` first.
    """

    def __init__(
        self,
        model: ShardedModel,
        sub_buffers: Sequence[SubBuffer],
        *,
        device: torch.device,
        warmup_steps: int,
        update_of: Callable[[Update], UpdateSubBuffer],
    ) -> None:
        self._model, self._sub_buffers = model, tuple(sub_buffers)
        self._warmup_steps, self._update_of = warmup_steps, update_of
        self._thread = make_thread(device)
        self._under_way: list[tuple[SubBuffer, HostUpdate]] = []
        self._num_forwards = 0
        for sub_buffer in self._sub_buffers:
            sub_buffer.before_use = lambda is_written: self.drain()
            sub_buffer.refuses_writes = "zero_optimization.offload_optimizer.delayed_update"

    def begin(self, update: Update) -> bool:
        """Start the step from the present gradients, unless it belongs to the warmup.

        The previous step must be finished.
        """
        if self._under_way:
            raise AssertionError(f"step {update.step} begins, and the one before is not finished")
        if update.step <= self._warmup_steps:
            return False
        update_sub_buffer = self._update_of(update)
        for sub_buffer in reversed(self._sub_buffers):
            sums = sub_buffer.gradients.host_sums
            if sums is None:
                raise AssertionError(f"the gradients of {sub_buffer.label} are not in host memory")
            grads = partial(_whole, sums.take())
            host_update = HostUpdate(self._thread, sub_buffer, update_sub_buffer, grads=grads, room=None)
            self._under_way.append((sub_buffer, host_update))
        return True

    @torch.no_grad()
    def finish(self) -> None:
        """Errors: what the update raised"""
        under_way, self._under_way = self._under_way, []
        gathers = []
        try:
            for sub_buffer, host_update in under_way:
                host_update.publish()
                gathers.append(self._model.publish(sub_buffer))
        except BaseException:
            for _, host_update in under_way:
                host_update.drop()
            raise
        finally:
            for gather in gathers:
                gather.wait()

    def drain(self) -> None:
        """Finish the step under way for a caller between two steps that needs its result; the next forward
        then has the new parameters.

        Order:  a collective, if a step is under way
        Errors: ConfigError inside a forward or backward, where parameters must not change
        """
        if not self._under_way:
            return
        if self._num_forwards or in_backward():
            raise ConfigError(
                "parameters, masters or optimizer states are used from outside while a forward or backward "
                "runs, and zero_optimization.offload_optimizer.delayed_update has an update under way; use "
                "them between steps, or leave delayed_update out"
            )
        self._model.reshard_idle()
        self.finish()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Keep the parameters unchanged inside: a forward runs."""
        self._num_forwards += 1
        try:
            yield
        finally:
            self._num_forwards -= 1

    def before_gather(self) -> None:
        """Drain. A caller that only reads, inside a forward or backward, gets the parameters that this one
        uses.
        """
        if not self._num_forwards and not in_backward():
            self.drain()

    def close(self) -> None:
        try:
            self.finish()
        finally:
            self._thread.shutdown()


def _whole(grad: Tensor) -> Pieces:
    return ((0, grad),)
