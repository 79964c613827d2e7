"""Times at which the host updates values in its memory: in the step, in the backward before the step, or
during the next forward and backward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from .host_update import Update


class StepSchedule:
    """Updates that run in the step."""

    def finish(self) -> None:
        """Wait until all parameters have the values of all steps so far.

        Order: a collective
        """

    def begin(self, update: Update) -> bool:
        """Begin a step whose gradients and arguments are known.

        Return True if the update is under way, False if the caller has to make it.
        """
        return False

    def forward(self) -> AbstractContextManager[object]:
        """Return a context for a forward."""
        return nullcontext()

    def before_gather(self) -> None:
        """Prepare for parameters to be gathered for the program, not for the model's own forward.

        Order: a collective
        """

    def close(self) -> None:
        """End all steps.

        Order: a collective
        """
