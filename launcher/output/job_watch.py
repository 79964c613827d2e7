"""Who is told how far a job is: the record that others read of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ..inputs.line_prefix import Origin
from ..telemetry.telemetry import Telemetry


class JobWatch(Protocol):
    """Told by the thread that runs the job. No method raises, and none takes long."""

    def began(
        self,
        origins: tuple[Origin, ...],
        *,
        log_folder: Path | None,
        warn: Callable[[str], None],
        telemetry: Telemetry,
    ) -> None:
        """An attempt begins, with these workers. `warn` is told what goes wrong, now or later."""
        ...

    def started(self) -> None:
        """All its workers run."""
        ...

    def stopping(self) -> None:
        """They are told to end."""
        ...

    def abandoned(self, exit_code: int) -> None:
        """Its process ends now, by a signal that may have come in the middle of another of these calls."""
        ...

    def reported(self, failure: str) -> None:
        """The attempt has ended: a sentence on what failed first, or nothing."""
        ...
