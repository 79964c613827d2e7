"""The job that a command is about, found by the word on its command line."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import click

from ...shared.table import table, terminal_columns
from ..errors import LaunchError
from ..output.screen_text import screen_text
from ..registry.known_jobs import ELSEWHERE, LOST, AmbiguousError, KnownJob, find_job, known_jobs
from ..wording import cleaned

OF_RUNNING = ("stop", "stacks")  # commands that make sense only for a running job


def _chosen_job(word: str) -> KnownJob:
    try:
        return find_job(word)
    except AmbiguousError as error:
        _show(error.jobs)
        raise


def chosen_or_only_job(word: str | None, command: str) -> KnownJob:
    """Return the job that `dslaunch COMMAND WORD` means; without a word the only job that runs here. If
    several match, a table on stderr shows them.

    Errors: LaunchError if there is none, or several
    """
    if word is not None:
        return _chosen_job(word)
    live = [one for one in known_jobs() if one.is_live and one.state != ELSEWHERE]
    if not live:
        ended = "" if command in OF_RUNNING else f"; dslaunch {command} JOB takes one that has ended, too"
        raise LaunchError(f"no job runs here{ended}")
    if len(live) > 1:
        _show(live)
        raise LaunchError(f"{len(live)} jobs run here; write: dslaunch {command} JOB")
    return live[0]


def next_of_name(job: KnownJob, command: str) -> str:
    """Return advice with the running jobs called like `job` plus a number (train-2); empty without any."""
    name = re.compile(re.escape(job.record.name) + "-[0-9]+")
    live = [one.record.name for one in known_jobs() if one.is_live and name.fullmatch(one.record.name)]
    commands = " or ".join(f"dslaunch {command} {one}" for one in live[:3])
    return f"; {' and '.join(live[:3])} {'runs' if len(live) == 1 else 'run'}: {commands}" if live else ""


def _show(jobs: Sequence[KnownJob]) -> None:
    rows = [(one.record.id, one.state, started(one), one.record.host, str(one.record.pid)) for one in jobs]
    head = ("exact name", "state", "started", "host", "pid")
    click.echo(
        screen_text(table(rows, head=head, numbers=(4,), columns=terminal_columns())), nl=False, err=True
    )


def refuse_elsewhere(job: KnownJob, command: str) -> None:
    """Errors: LaunchError for a job of another machine that keeps its records in the same folder"""
    if job.state == ELSEWHERE:
        host = job.record.host
        raise LaunchError(
            f"{job.record.id} runs on {host}, and is reached from there only: ssh {host} dslaunch {command} "
            f"{job.record.id}"
        )


def started(job: KnownJob) -> str:
    """Return the time when the job started, by this machine's clock."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.record.began_at))


def how_it_ended(job: KnownJob) -> str:
    """Return a sentence on a job that has ended."""
    record = job.record
    if job.state == LOST:
        return f"{record.name} is lost: {job.why}"
    if job.why:
        return f"{record.name}: {job.why}"
    verdict = f": {cleaned(record.verdict)}" if record.verdict else ""
    return f"{record.name} ended with exit code {record.exit_code}{verdict}"
