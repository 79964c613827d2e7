"""`dslaunch stop`: end a job, and wait until it has ended."""

from __future__ import annotations

import time
from typing import Any

import click

from ..errors import LaunchError
from ..output.console import Console
from ..registry.following import REMOVED, now_of
from ..registry.known_jobs import KnownJob
from ..registry.stopping import Stopping
from ..wording import shown_time
from .job_choice import chosen_or_only_job, how_it_ended, next_of_name, refuse_elsewhere
from .prefix_command import SETTINGS, PrefixCommand

EPILOG = """
\b
The workers get SIGTERM, and SIGKILL after the --kill_grace of the job. With --now they get SIGKILL at once.
The exit code is 0 once the job has ended, or had ended before. Ctrl-C ends the waiting only.
"""
PROGRESS_AFTER_S = 2.0
PROGRESS_EVERY_S = 5.0


@click.command(cls=PrefixCommand, epilog=EPILOG, context_settings=SETTINGS)
@click.argument("job", required=False, metavar="[JOB]")
@click.option("--now", is_flag=True, help="Kill the workers at once.")
def command(**given: Any) -> int:
    """End the job JOB in order, and wait until it has ended."""
    job = chosen_or_only_job(given["job"], "stop")
    refuse_elsewhere(job, "stop")
    if not job.is_live:
        click.echo(
            f"dslaunch: {how_it_ended(job)}{'' if job.why else ' before'}{next_of_name(job, 'stop')}",
            err=True,
        )
        return 0
    console = Console(log_level="info")
    try:
        stop(job, console, is_now=given["now"])
    except KeyboardInterrupt:
        raise LaunchError(
            f"{job.record.name} was told to stop and is still ending; `dslaunch stop --now {job.record.id}` "
            "kills its workers",
            exit_code=130,
        ) from None
    finally:
        console.drain()
    return 0


def stop(job: KnownJob, console: Console, *, is_now: bool) -> None:
    """Tell the job to end, and wait until it has ended."""
    name = job.record.name
    began = time.monotonic()
    tell_at = began + PROGRESS_AFTER_S
    with Stopping(job) as stopping:
        stopping.tell(is_now=is_now)
        while not stopping.has_ended():
            now = time.monotonic()
            if said := stopping.end_by_force():
                console.warn(said)
            if now > tell_at:
                tell_at = now + PROGRESS_EVERY_S
                console.say(f"{name} is {now_of(job).state}, for {shown_time(now - began)} now")
    ended = now_of(job)
    console.say(f"{name} has ended" if ended.why == REMOVED else how_it_ended(ended))
