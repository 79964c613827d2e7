"""Follows the progress of a job: the record that other commands read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ..inputs.line_prefix import Origin
from ..telemetry.telemetry import Telemetry


class JobWatch(Protocol):
    """Is called by the thread that runs the job. No method raises, and none takes long."""

    def began(
        self,
        origins: tuple[Origin, ...],
        *,
        log_folder: Path | None,
        warn: Callable[[str], None],
        telemetry: Telemetry,
    ) -> None:
        """Begin an attempt with these workers. `warn` gets problems, now or later."""
        ...

    def started(self) -> None:
        """Note that all its workers run."""
        ...

    def stopping(self) -> None:
        """Note that the workers are told to end."""
        ...

    def abandoned(self, exit_code: int) -> None:
        """Note that the job's process ends now, by a signal that may have come during another of these
        calls.
        """
        ...

    def reported(self, failure: str) -> None:
        """The attempt has ended: a sentence on what failed first, or nothing."""
        ...
