"""The known jobs of this user, their states, and the job that a name means."""

from __future__ import annotations

import difflib
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import LaunchError
from .holder import holder_of
from .journal_reader import last_line
from .record import JobRecord, JobState, read_record, this_boot, this_host
from .state_folder import readable_folder

KEPT_S = 7 * 86400.0
MAX_KEPT = 100
RECENT_S = 86400.0  # jobs that ended before are listed with --all only
HALF_MADE_S = 3600.0  # then a folder without a record is left from a crash
LOST, ELSEWHERE = "lost", "elsewhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownJob:
    """A record, and the state of its job: a state of the record, LOST, or ELSEWHERE."""

    folder: Path
    record: JobRecord
    state: str
    why: str = ""  # the reason why it is lost, or unknown

    @property
    def is_live(self) -> bool:
        """Tell whether it is there, as far as that is known here."""
        return self.state not in (JobState.ENDED.value, LOST)

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.record.began_at)

    @property
    def last_line(self) -> str:
        """Return its last output, or where that is."""
        if self.why:
            return self.why
        if self.record.is_detached:
            line = last_line(self.folder)
            return f"{self.record.problem}; {line}" if self.record.problem else line
        return f"in the foreground of {self.record.console or 'another process'}"


def known_jobs() -> list[KnownJob]:
    """Return all jobs, the oldest first.

    Errors: LaunchError if the folder of records is not ours alone
    """
    folder = readable_folder()
    if folder is None:
        return []
    found = (look_at(folder / name) for name in _names(folder))
    return sorted((one for one in found if one is not None), key=lambda one: one.record.began_at)


def look_at(folder: Path) -> KnownJob | None:
    """Return the job of this folder; None if it has no readable record.

    For a job of this machine the lock of its process decides: see holder.py.
    """
    record = read_record(folder)
    if record is not None and record.boot_id == this_boot() and holder_of(folder) is None:
        record = read_record(folder)  # its last change may have come between the two looks
    elif record is not None and record.boot_id == this_boot():
        return KnownJob(folder=folder, record=record, state=record.state.value)
    if record is None:
        return None
    if record.state is JobState.ENDED:
        return KnownJob(folder=folder, record=record, state=record.state.value)
    if record.boot_id == this_boot():
        why = f"its dslaunch (pid {record.pid}) was killed; the hosts end its workers when they miss it"
        return KnownJob(folder=folder, record=record, state=LOST, why=why)
    if record.host == this_host():
        return KnownJob(folder=folder, record=record, state=LOST, why=f"{record.host} was started anew")
    why = f"on {record.host}: ask there"
    return KnownJob(folder=folder, record=record, state=ELSEWHERE, why=why)


def find_job(word: str) -> KnownJob:
    """Return the job that is meant by a name, an exact name or a process id.

    Errors: LaunchError if there is none; AmbiguousError if there are several
    """
    jobs = known_jobs()
    exact = [one for one in jobs if one.record.id == word]
    if exact:
        return exact[0]
    if word.isascii() and word.isdigit():
        by_pid = [
            one for one in jobs if one.is_live and one.state != ELSEWHERE and one.record.pid == int(word)
        ]
        if by_pid:
            return by_pid[0]
    named = [one for one in jobs if one.record.name == word]
    live = [one for one in named if one.is_live]
    if len(live) == 1 or (not live and len(named) == 1):
        return (live or named)[0]
    if named:
        raise AmbiguousError(word, live or named)
    near = difflib.get_close_matches(word, {one.record.name for one in jobs}, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? `dslaunch jobs` lists all" if near else "see `dslaunch jobs`"
    raise LaunchError(f"no job {word[:80]!r} is known here; {hint}")


class AmbiguousError(LaunchError):
    """Several jobs have the name; `jobs` are these."""

    def __init__(self, word: str, jobs: Sequence[KnownJob]) -> None:
        super().__init__(
            f"{len(jobs)} jobs are called {word}: write the exact name of one, e.g. {jobs[-1].record.id}"
        )
        self.jobs = tuple(jobs)


def exact_names(jobs: Iterable[KnownJob]) -> dict[Path, str]:
    """Return each job's name in a table: its name, or the exact one where several have it."""
    jobs = list(jobs)
    names = [one.record.name for one in jobs]
    return {
        one.folder: one.record.name if names.count(one.record.name) == 1 else one.record.id for one in jobs
    }


def clean(*, keep: Path | None = None) -> None:
    """Remove the records of jobs that ended long ago, or long before others, or of which another machine gave
    no sign for long; never `keep`, nor one that may still be there.
    """
    folder = readable_folder()
    if folder is None:
        return
    over = []
    for name in _names(folder):
        one = folder / name
        if one == keep:
            continue
        job = look_at(one)
        if job is None:
            _remove_half_made(one)
        elif job.state == ELSEWHERE:
            _remove_silent(one)
        elif not job.is_live:
            over.append((max(job.record.ended_at, job.record.began_at), one))
    over.sort(reverse=True)
    now = time.time()
    for place, (at_s, one) in enumerate(over):
        if place >= MAX_KEPT or now - at_s > KEPT_S:
            shutil.rmtree(one, ignore_errors=True)


def _remove_silent(folder: Path) -> None:
    """Remove the record of a job on another machine that has given no sign of life for long, by the clock of
    the machine whose disk it is: this machine's may be wrong.
    """
    try:
        os.utime(folder.parent)
        now = os.stat(folder.parent).st_mtime
        signs = [one.stat(follow_symlinks=False).st_mtime for one in os.scandir(folder)]
        if now - max(signs, default=now) > KEPT_S and holder_of(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return


def _remove_half_made(folder: Path) -> None:
    try:
        is_old = time.time() - os.stat(folder).st_mtime > HALF_MADE_S
        if is_old and holder_of(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return


def _names(folder: Path) -> list[str]:
    try:
        return [one.name for one in os.scandir(folder) if one.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise LaunchError(f"{folder}: {error.strerror}; make it readable") from None
