"""`dslaunch jobs`: the jobs of this user, detached ones and those in the foreground."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from ...shared.table import table, terminal_columns
from ..inputs.host_list import folded
from ..output.screen_text import screen_text
from ..registry.known_jobs import ELSEWHERE, LOST, RECENT_S, KnownJob, clean, exact_names, known_jobs
from ..registry.record import JobState, as_json
from ..registry.state_folder import state_folder
from ..wording import cleaned, count, shown_time
from .prefix_command import SETTINGS, PrefixCommand

EPILOG = """
\b
A job is
  starting, running, stopping   as its own process has it
  ended N                       with this exit code
  lost                          its dslaunch was killed, or the machine was started anew
  elsewhere                     on another machine that has the same home folder

The records are in $XDG_STATE_HOME/dslaunch, else in ~/.local/state/dslaunch, which no other user may enter.
Those of jobs that have ended are kept for 7 days, and for 100 jobs; of a job in the foreground none is left.
"""
MAX_LINE = 200


@click.command(cls=PrefixCommand, epilog=EPILOG, context_settings=SETTINGS)
@click.option("--all", is_flag=True, help="Also jobs that ended more than a day ago.")
@click.option("--json", is_flag=True, help="Print one JSON list, with all that is known of each job.")
def command(**given: Any) -> int:
    """List your jobs on this machine."""
    clean()
    jobs = known_jobs()
    shown = [one for one in jobs if given["all"] or one.is_live or _is_recent(one)]
    if given["json"]:
        click.echo(json.dumps([_as_json(one) for one in shown], indent=2))
        return 0
    if not shown:
        click.echo(f"no job is known here (records: {state_folder()})")
    else:
        names = exact_names(jobs)
        rows = [_row(one, names[one.folder]) for one in shown]
        head = ("name", "state", "hosts", "ranks", "age", "last line")
        click.echo(screen_text(table(rows, head=head, numbers=(3,), columns=terminal_columns())), nl=False)
    if len(shown) < len(jobs):
        click.echo(f"{count(len(jobs) - len(shown), 'older job')}: dslaunch jobs --all")
    return 0


def _row(job: KnownJob, name: str) -> tuple[str, ...]:
    record = job.record
    state = f"ended {record.exit_code}" if job.state == JobState.ENDED.value else job.state
    if record.attempt and job.is_live and job.state != ELSEWHERE:
        state += f", attempt {record.attempt + 1}"
    last = record.verdict if job.state == JobState.ENDED.value and record.verdict else job.last_line
    return (
        name,
        state,
        folded(record.hosts) if record.hosts else "",
        str(record.num_ranks or ""),
        shown_time(job.age_s),
        cleaned(last, MAX_LINE),
    )


def _is_recent(job: KnownJob) -> bool:
    return time.time() - max(job.record.ended_at, job.record.began_at) < RECENT_S


def _as_json(job: KnownJob) -> dict[str, Any]:
    has_code = job.state == JobState.ENDED.value
    return {
        **as_json(job.record),
        "id": job.record.id,
        "state": job.state,
        "exit_code": job.record.exit_code if has_code else None,
        "is_live": job.is_live,
        "why": job.why if job.state in (LOST, ELSEWHERE) else "",
        "last_line": job.last_line,
        "folder": str(job.folder),
    }
