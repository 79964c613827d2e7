"""The look at the output of a job: can it still be written?"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..job.verdict import Failure, OutputFailure
from ..output.console import Console


class OutputWatch:
    """Adds to the failures of a job that its output is lost, once."""

    def __init__(self, console: Console, failures: list[Failure]) -> None:
        self._console, self._failures = console, failures
        self._is_lost = False

    def look(self, interrupts: Sequence[int]) -> None:
        """Look at the console, and give up what blocks it once the job was interrupted."""
        self._console.look()
        if interrupts:
            self._console.give_up_if_stuck(is_urgent=len(interrupts) > 1)
        failure = self._console.failure
        if failure is not None and not self._is_lost:
            self._is_lost = True
            self._failures.append(
                OutputFailure(message=str(failure), at_s=time.monotonic(), exit_code=failure.exit_code)
            )
