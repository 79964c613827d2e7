"""Times at which the host updates values in its memory: in the step, in the backward before it,
or beside the one after it.
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

        Return whether the update is under way; else it is to be made.
        """
        return False

    def forward(self) -> AbstractContextManager[object]:
        """A forward runs inside."""
        return nullcontext()

    def before_gather(self) -> None:
        """Parameters are about to be gathered for the program, not for the model.

        Order: a collective
        """

    def close(self) -> None:
        """End all steps.

        Order: a collective
        """
