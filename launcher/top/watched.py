"""A job that is watched: its events and its record, as far as they have come."""

from __future__ import annotations

import time

from ..registry.following import REMOVED, now_of
from ..registry.known_jobs import KnownJob
from ..registry.record import JobState
from ..run_state.event_reader import EventReader
from ..run_state.run_state import RunState
from .view import JobFacts

EVENTS = "events"  # in the job's folder
_LOOK_S = 0.2  # the screen may stand still so long while much is read


class Watched:
    """One job, with the state of its run."""

    def __init__(self, job: KnownJob) -> None:
        self.job = job
        self.state = RunState()
        self._reader = EventReader(job.folder / EVENTS)

    def look(self, *, limit_s: float = _LOOK_S) -> bool:
        """Take news; False if there are more, which the next look takes.

        The job is looked at first: of one that has ended all events are there.
        """
        self.job = now_of(self.job)
        deadline = time.monotonic() + limit_s
        for place, event in enumerate(self._reader.events()):
            self.state.take(event)
            if place % 16 == 0 and time.monotonic() > deadline:
                return False
        return True

    @property
    def has_ended(self) -> bool:
        """Tell whether it has ended."""
        return not self.job.is_live

    @property
    def facts(self) -> JobFacts:
        """Return the facts in the record."""
        record, job = self.job.record, self.job
        is_told = self.state.exit_code is not None and job.why == REMOVED
        code = record.exit_code if job.state == JobState.ENDED.value and not job.why else self.state.exit_code
        return JobFacts(
            name=record.name,
            state=job.state,
            is_live=job.is_live,
            why="" if job.is_live or is_told else job.why,
            began_at=record.began_at,
            ended_at=record.ended_at,
            num_hosts=len(record.hosts),
            num_ranks=record.num_ranks,
            attempt=record.attempt,
            exit_code=None if job.is_live else code,
            verdict=record.verdict,
            has_events=self.state.at > 0,
        )

    def close(self) -> None:
        self._reader.close()
