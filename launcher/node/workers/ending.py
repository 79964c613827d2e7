"""The end of a job on one host: first asked for, then forced."""

from __future__ import annotations

import os
import time

from ..system.lean_stdlib import signal
from ..system.process_tree import descendants, kill_descendants
from .worker_group import WorkerGroup

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

LEFT_OVER_GRACE_S = 2.0  # grace time for processes that outlive their worker


class Ending:
    """SIGTERM at its beginning, SIGKILL when its time is up; it is over when `top` has no descendants, but
    those that are spared.
    """

    def __init__(
        self, workers: WorkerGroup, *, top: int | None = None, spared: Callable[[], Collection[int]] = tuple
    ) -> None:
        self.num_left_over = 0  # processes that outlived the last worker
        self._workers = workers
        self._top = os.getpid() if top is None else top
        self._spared = spared
        self._has_asked_rest = False
        self._kill_at = float("inf")

    def begin(self, grace_s: float) -> None:
        """Ask all workers to end; kill the rest after `grace_s`."""
        self._kill_at = time.monotonic() + grace_s
        self._workers.signal(signal.SIGTERM, signal.SIGCONT)  # a stopped process takes no other signal

    def begin_with_left_over(self) -> None:
        """Ask the processes that the workers left running to end; the workers ended by themselves."""
        self.num_left_over = len(self._left())
        self._has_asked_rest = True
        self._kill_at = time.monotonic() + (LEFT_OVER_GRACE_S if self.num_left_over else 0)
        self._kill(signal.SIGTERM)

    def hasten(self, grace_s: float) -> None:
        """Shorten the grace time if `grace_s` is less than what is left of it."""
        self._kill_at = min(time.monotonic() + grace_s, self._kill_at)

    def go_on(self, now: float) -> bool:
        """Do what is due; returns whether it is over."""
        if now >= self._kill_at:
            self._kill(signal.SIGKILL)
            self._workers.collect(is_our_kill=True)
        elif not self._has_asked_rest and self._workers.is_ended:
            self._has_asked_rest = True
            self._kill(signal.SIGTERM)  # the workers' own children
            self._kill_at = min(self._kill_at, now + LEFT_OVER_GRACE_S)
        return not self._left() and self._workers.is_told

    def _left(self) -> list[int]:
        return descendants(self._top, besides=self._spared)

    def _kill(self, signum: int) -> None:
        kill_descendants(self._top, signum, besides=self._spared)
