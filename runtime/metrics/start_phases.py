"""The phases of a worker's start that its program alone knows: a checkpoint is loaded, a step is done.

In a job that may start again, and with --timings, the launcher gives a named pipe for them. It is opened for
two short lines, once in the life of a process. This file imports neither torch nor anything that does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from functools import cache

from ..environment import MilestonesPlace, claim, read_milestones

LOADED, FIRST_STEP = "loaded", "first step"
_FLAGS = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW


class StartPhases:
    """Tells the launcher of the first step, and of the last load before it."""

    def __init__(self, place: MilestonesPlace) -> None:
        self._place = place
        self._loaded_at: float | None = None
        self._is_over = False

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Note the end of a load, which is inside."""
        yield
        self._loaded_at = time.monotonic()

    def end_step(self) -> None:
        """End a step. Only the first one is told: the start is over then."""
        if self._is_over:
            return
        self._is_over = True
        phases = {LOADED: self._loaded_at, FIRST_STEP: time.monotonic()}
        lines = [f"{self._place.rank} {at!r} {name}\n" for name, at in phases.items() if at is not None]
        with contextlib.suppress(OSError):  # the launcher is gone
            fd = os.open(self._place.path, _FLAGS)
            try:
                os.write(fd, "".join(lines).encode("ascii"))
            finally:
                os.close(fd)


@cache
def start_phases() -> StartPhases | None:
    """Return the phases of this process; None where the launcher asks for none, and in a process that the
    worker has started.
    """
    place = read_milestones()
    return (
        None if place is None or not claim("DSLAUNCH_MILESTONES_PROCESS", place.path) else StartPhases(place)
    )
