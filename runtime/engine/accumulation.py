"""Place of the present micro batch in an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Accumulation:
    """The micro batches since the last optimizer step.

    A step is due after `steps` of them. The total would be useless once the program, or a checkpoint, changes
    the number for a step, so only those since the last step are counted.
    """

    def __init__(self, steps: int, *, is_managed: bool = True, sum_over: int = 1) -> None:
        """`steps`: micro batches for one optimizer step; it may be set at a boundary. Without `is_managed`,
        every step() is an optimizer step, and `steps` only divides each loss. `sum_over`: number of ranks
        over which gradients are added up; 1: they are averaged.
        """
        self.steps = steps
        self.is_managed, self.sum_over = is_managed, sum_over
        self.is_in_no_sync = False
        self._forced_boundary: bool | None = None
        self._num_waiting = 0
        self._has_begun = False  # True from the backward of a micro batch until its step()

    @property
    def is_boundary(self) -> bool:
        """Tell whether the present micro batch ends an optimizer step; if the program decides that, False
        until step().
        """
        if not self.is_managed:
            return False
        if self._forced_boundary is not None:
            return self._forced_boundary
        return self._num_waiting + 1 >= self.steps

    @property
    def is_step_due(self) -> bool:
        """True if the next `step()` updates the parameters."""
        return self.is_boundary or not self.is_managed

    @property
    def num_micro_batches(self) -> int:
        """Return the number of micro batches of the step that is due."""
        return self.steps if self.is_managed else self.num_partial

    @property
    def divisor(self) -> float:
        """Return the divisor of a micro batch's loss, before the ranks average gradients."""
        return self.steps / self.sum_over

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
        """Note that a backward begins."""
        self._num_waiting += self._has_begun and not self.is_managed
        self._has_begun = True

    def end_micro_batch(self, *, is_boundary: bool) -> None:
        """Note that `step()` was called."""
        self._num_waiting = 0 if is_boundary else self._num_waiting + 1
        self._has_begun = False

    def forget(self) -> int:
        """Forget the micro batches since the last step; return how many of them had ended."""
        ended, self._num_waiting, self._has_begun = self._num_waiting, 0, False
        return ended
