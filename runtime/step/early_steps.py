"""The step in the backward before it: each sub-buffer is updated as soon as its gradient has
come to host memory.

The norm of all gradients is not known then, so it is a guess: that nothing has to be clipped, that all is
finite, and that no program changes anything before the step. Where the guess is wrong for a sub-buffer, its
update is dropped and made again in the step. So the numbers are those of a run without this, bit for bit.
Source: SuperOffload (arXiv 2509.21271), "speculation-then-validation". DeepSpeed 0.19.8 updates in place and
        computes a wrong guess
backwards (csrc/adam, `ds_adam_rollback`), which leaves other bits than there were;
here nothing has to be put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..zero.sub_buffer import SubBuffer
from .host_update import AsideUpdate, Room, Update, UpdatePart, make_thread
from .step_schedule import StepSchedule


class EarlySteps(StepSchedule):
    """Of the sub-buffers that have their gradients and states in host memory."""

    def __init__(
        self,
        parts: Sequence[SubBuffer],
        *,
        device: torch.device,
        foresee: Callable[[], Update | None],
        update_of: Callable[[Update], UpdatePart],
    ) -> None:
        """`foresee` tells what the coming step will do; None while a backward runs that ends no step."""
        self._foresee, self._update_of = foresee, update_of
        self._thread = make_thread(device)
        self._rooms: dict[SubBuffer, Room] = {}
        self._guesses: dict[SubBuffer, tuple[Update, AsideUpdate]] = {}
        self.num_right = self.num_wrong = 0  # updates of a sub-buffer, so far
        for part in parts:
            sums = part.gradients.host_sums
            if sums is not None:
                self._rooms[part] = Room(part)
                sums.watch(before_change=partial(self._drop, part), landed=partial(self._start, part))
                part.before_use = partial(self._before_use, part)

    def begin(self, update: Update) -> bool:
        """Leave the right guesses to the step."""
        for part, (guess, aside) in list(self._guesses.items()):
            if guess == update:
                del self._guesses[part]
                part.optimizer_shard.made_aside = aside
                self.num_right += 1
            else:
                self._drop(part)
        return False

    def close(self) -> None:
        for part in list(self._guesses):
            self._drop(part)
        self._thread.shutdown()

    def _start(self, part: SubBuffer) -> None:
        update = self._foresee()
        if update is not None:
            numel = part.optimizer_shard.master.numel()
            aside = AsideUpdate(
                self._thread,
                part,
                self._update_of(update),
                grads=lambda: tuple(part.gradients.pieces(0, numel)),
                room=self._rooms[part],
            )
            self._guesses[part] = (update, aside)

    def _drop(self, part: SubBuffer) -> None:
        left, part.optimizer_shard.made_aside = part.optimizer_shard.made_aside, None
        if left is not None:  # by a step that failed half-way
            left.drop()
        guess = self._guesses.pop(part, None)
        if guess is not None:
            guess[1].drop()
            self.num_wrong += 1

    def _before_use(self, part: SubBuffer, is_written: bool) -> None:
        if is_written:  # who reads sees what was before the step
            self._drop(part)
