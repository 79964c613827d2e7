"""The events and the report of a run that a user names: by a path, or by the name of a job."""

from __future__ import annotations

from pathlib import Path

from ..errors import LaunchError
from ..page.read_run import EVENTS, RunSource, find_source, source_in
from ..registry.known_jobs import KnownJob, find_job
from ..registry.own_entry import EVENTS as REGISTRY_EVENTS


def find_run(word: str) -> RunSource:
    """Return the run that this word names. Errors: LaunchError if there is neither such a path nor such a
    job
    """
    try:
        found, problem = find_source(word), None
    except LaunchError as error:
        found, problem = None, error
    if found is not None:
        return found
    if problem is not None and ("/" in word or word in (".", "..")):
        raise problem
    try:
        job = find_job(word)
    except LaunchError as error:
        if problem is not None:
            raise problem from None
        raise LaunchError(f"{word}: no such file or folder, and {error}") from None
    return _source_of_job(job)


def _source_of_job(job: KnownJob) -> RunSource:
    """Return the records of a job. Errors: LaunchError if there are none"""
    log_folder = job.record.log_folder
    if log_folder and (Path(log_folder) / EVENTS).is_file():
        found = source_in(Path(log_folder))
        return RunSource(label=job.record.id, events=found.events, report=found.report, state=job.state)
    events = job.folder / REGISTRY_EVENTS
    if not events.is_file():
        raise LaunchError(
            f"no events are kept of {job.record.id}; start a job with --log_dir, and give that folder"
        )
    return RunSource(label=job.record.id, events=events, state=job.state)
