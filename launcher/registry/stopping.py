"""Ending a job from outside, in order or at once.

Signals do it, as in a terminal: the first ends the job in order, the second kills its workers at once, and
the third ends the process of the job itself (controller/job_signals.py). So before a second one is sent the
record must say that the job is stopping already, lest it be the third.
"""

from __future__ import annotations

import signal
import time

from ..errors import LaunchError
from .holder import Process
from .known_jobs import KnownJob, look_at
from .record import JobState

WAIT_S = 0.1
HEARD_WITHIN_S = 5.0  # the first signal
# After it --now ends the process of the job itself; hosts then end their workers by themselves.
KILLED_WITHIN_S = 15.0


def job_process(job: KnownJob) -> Process:
    """Return the process of a job that is there.

    Errors: LaunchError if it is gone, or cannot be reached from here
    """
    process = _process_of(job)
    if process is None:
        raise LaunchError(f"{job.record.id} has just ended")
    return process


def _process_of(job: KnownJob) -> Process | None:
    """Return the process; None if it has ended. Errors: LaunchError if it cannot be reached from here"""
    try:
        return Process(job.folder)
    except ProcessLookupError:
        now = look_at(job.folder)
        if now is None or not now.is_live:
            return None
        raise LaunchError(
            f"{job.record.id} runs in a container of its own, and is reached from in there only"
        ) from None


class Stopping:
    """One job that is told to end."""

    def __init__(self, job: KnownJob) -> None:
        """Errors: LaunchError if its process cannot be reached from here"""
        self._job = job
        self._kill_at = float("inf")
        self._process = _process_of(job)

    def tell(self, *, is_now: bool) -> None:
        """End it in order, or kill its workers; the latter waits until the first signal was heard."""
        if self._process is None:
            return
        if not self._is_stopping():
            self._process.signal(signal.SIGTERM)
        self._process.signal(signal.SIGCONT)  # a stopped process gets no other signal
        if is_now:
            self._kill_at = time.monotonic() + KILLED_WITHIN_S
            deadline = time.monotonic() + HEARD_WITHIN_S
            while not self._is_stopping() and time.monotonic() < deadline:
                if self.has_ended():
                    return
            self._process.signal(signal.SIGINT)

    def has_ended(self) -> bool:
        """Tell whether it has ended, after a short wait."""
        return self._process is None or self._process.has_ended(WAIT_S)

    def end_by_force(self) -> str:
        """Kill the process of the job itself if it is time for that; return a sentence about it."""
        if self._process is None or time.monotonic() < self._kill_at:
            return ""
        self._kill_at = float("inf")
        self._process.signal(signal.SIGKILL)
        return (
            f"{self._job.record.name} did not end within {KILLED_WITHIN_S:g} s, so its own process was "
            "killed; its hosts end the workers when they miss it"
        )

    def _is_stopping(self) -> bool:
        found = look_at(self._job.folder)
        return found is not None and found.state == JobState.STOPPING.value

    def __enter__(self) -> Stopping:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()
