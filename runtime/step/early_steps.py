"""Early steps: in the backward itself, each sub-buffer is updated as soon as its gradient is in host memory.

The norm of all gradients is not known then, so an update is a guess: that clipping is not needed, that all
gradients are finite, and that the program changes nothing before the step. If the guess is wrong for a
sub-buffer, its update is dropped and made again in the step. So results are the same as without early steps,
bit for bit.
Source: SuperOffload (arXiv 2509.21271), "speculation-then-validation". DeepSpeed 0.19.8 updates in place and
        computes a wrong guess backwards (csrc/adam, `ds_adam_rollback`), which leaves other bits than before;
        here no update has to be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..zero.units.sub_buffer import SubBuffer
from .host_update import HostUpdate, Room, Update, UpdateSubBuffer, make_thread
from .step_schedule import StepSchedule


class EarlySteps(StepSchedule):
    """Early steps of the sub-buffers that have their gradients and states in host memory."""

    def __init__(
        self,
        sub_buffers: Sequence[SubBuffer],
        *,
        device: torch.device,
        foresee: Callable[[], Update | None],
        update_of: Callable[[Update], UpdateSubBuffer],
    ) -> None:
        """`foresee` returns the arguments of the coming step; None during a backward that ends no step."""
        self._foresee, self._update_of = foresee, update_of
        self._thread = make_thread(device)
        self._rooms: dict[SubBuffer, Room] = {}
        self._guesses: dict[SubBuffer, tuple[Update, HostUpdate]] = {}
        # number of sub-buffer updates so far whose guess was right, or wrong
        self.num_right = self.num_wrong = 0
        for sub_buffer in sub_buffers:
            sums = sub_buffer.gradients.host_sums
            if sums is not None:
                self._rooms[sub_buffer] = Room(sub_buffer)
                sums.watch(
                    before_change=partial(self._drop, sub_buffer), landed=partial(self._start, sub_buffer)
                )
                sub_buffer.before_use = partial(self._before_use, sub_buffer)

    def begin(self, update: Update) -> bool:
        """Keep the updates whose guesses came true, for the step."""
        for sub_buffer, (guess, host_update) in list(self._guesses.items()):
            if guess == update:
                del self._guesses[sub_buffer]
                sub_buffer.optimizer_shard.pending_update = host_update
                self.num_right += 1
            else:
                self._drop(sub_buffer)
        return False

    def close(self) -> None:
        for sub_buffer in list(self._guesses):
            self._drop(sub_buffer)
        self._thread.shutdown()

    def _start(self, sub_buffer: SubBuffer) -> None:
        update = self._foresee()
        if update is not None:
            numel = sub_buffer.optimizer_shard.master.numel()
            host_update = HostUpdate(
                self._thread,
                sub_buffer,
                self._update_of(update),
                grads=lambda: tuple(sub_buffer.gradients.pieces(0, numel)),
                room=self._rooms[sub_buffer],
            )
            self._guesses[sub_buffer] = (update, host_update)

    def _drop(self, sub_buffer: SubBuffer) -> None:
        left, sub_buffer.optimizer_shard.pending_update = sub_buffer.optimizer_shard.pending_update, None
        if left is not None:  # left by a step that failed half-way
            left.drop()
        guess = self._guesses.pop(sub_buffer, None)
        if guess is not None:
            guess[1].drop()
            self.num_wrong += 1

    def _before_use(self, sub_buffer: SubBuffer, is_written: bool) -> None:
        if is_written:  # a reader sees the values from before the step
            self._drop(sub_buffer)
