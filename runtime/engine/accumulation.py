"""Which micro batch of an optimizer step it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Accumulation:
    """The micro batches since the last optimizer step.

    A step is due after `steps` of them. Their number in all says nothing once a program, or a checkpoint, has
    another number for a step: so those since the last step are counted.
    """

    def __init__(self, steps: int) -> None:
        """`steps`: micro batches for one optimizer step; it may be set at a boundary."""
        self.steps = steps
        self.is_in_no_sync = False
        self._forced_boundary: bool | None = None
        self._num_waiting = 0
        self._has_begun = False  # the backward of a micro batch was called, and its step() was not

    @property
    def is_boundary(self) -> bool:
        """Whether the next `step()` updates the parameters."""
        if self._forced_boundary is not None:
            return self._forced_boundary
        return self._num_waiting + 1 >= self.steps

    @property
    def num_partial(self) -> int:
        """Return the number of micro batches whose gradients wait for a step."""
        return self._num_waiting + self._has_begun

    def force_boundary(self, is_boundary: bool | None) -> None:
        """Decide from now on whether `step()` is a boundary; None counts micro batches again."""
        self._forced_boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Say that the micro batches inside end no optimizer step."""
        was, self.is_in_no_sync = self.is_in_no_sync, True
        try:
            yield
        finally:
            self.is_in_no_sync = was

    def begin_micro_batch(self) -> None:
        """A backward begins."""
        self._has_begun = True

    def end_micro_batch(self, *, is_boundary: bool) -> None:
        """`step()` was called."""
        self._num_waiting = 0 if is_boundary else self._num_waiting + 1
        self._has_begun = False

    def forget(self) -> int:
        """Forget the micro batches since the last step; return how many of them had ended."""
        ended, self._num_waiting, self._has_begun = self._num_waiting, 0, False
        return ended
