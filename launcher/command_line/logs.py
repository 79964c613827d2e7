"""`dslaunch logs`: the output of a detached job so far."""

from __future__ import annotations

from typing import Any

import click

from ..errors import LaunchError
from ..inputs.rank_set import parse_ranks
from ..options.backend import LAUNCHERS
from ..options.number import Whole
from ..registry.following import Following, log_files_of
from ..registry.known_jobs import KnownJob
from ..registry.replay import Choice, Replay
from .job_choice import chosen_or_only_job, how_it_ended
from .prefix_command import SETTINGS, PrefixCommand

EPILOG = """
\b
Examples:
  dslaunch logs train
      all that the job has shown, as its console would have shown it here
  dslaunch logs train -f --rank 0,4-7
      what these ranks write, until the job ends

What a job shows is kept up to 32 MiB, the newest of it; --log_dir keeps all, of all ranks.
"""


@click.command(cls=PrefixCommand, epilog=EPILOG, context_settings=SETTINGS)
@click.argument("job", required=False, metavar="[JOB]")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.option("--rank", "--ranks", metavar="RANKS", help="Only what these ranks wrote: 0,4-7.")
@click.option("--tail", type=Whole(), metavar="N", help="Only the last N lines that are there now.")
@click.option("--timestamps", is_flag=True, help="Show when each line arrived.")
def command(**given: Any) -> int:
    """Print what the detached job JOB has shown."""
    job = chosen_or_only_job(given["job"], "logs")
    refuse_foreground(job, "logs")
    ranks = _ranks(given["rank"], job)
    replay = Replay(Choice(ranks=ranks, has_timestamps=given["timestamps"]))
    following = Following(job, replay)
    if given["tail"] is None:
        following.show_all()
    else:
        following.show_last(given["tail"])
    while given["follow"] and following.step():
        _end_if_unread(replay)
    _end_if_unread(replay)
    if given["follow"] and following.job.why:
        raise LaunchError(how_it_ended(following.job), exit_code=0)
    return 0


def refuse_foreground(job: KnownJob, command: str) -> None:
    """Errors: LaunchError for a job in the foreground: its output is in its own terminal"""
    if not job.record.is_detached:
        place = job.record.console or "its own process"
        raise LaunchError(
            f"dslaunch {command}: {job.record.id} runs in the foreground, and shows its output in {place} "
            f"(pid {job.record.pid}); start it with --detach"
        )


def _end_if_unread(replay: Replay) -> None:
    if replay.writer.failure is not None:
        raise replay.writer.failure


def _ranks(given: str | None, job: KnownJob) -> tuple[range, ...] | None:
    """Read the ranks. Errors: LaunchError for text that names no ranks, or ranks without output here"""
    if given is None:
        return None
    try:
        ranks = parse_ranks(given)
    except ValueError as error:
        raise LaunchError(f"--rank: {error}") from None
    record = job.record
    first, last = record.first_rank, record.first_rank + record.num_ranks - 1
    if record.launcher in LAUNCHERS and LAUNCHERS[record.launcher].starts_itself:
        raise LaunchError(
            f"--rank has no effect: {record.launcher} passes on what all ranks of {record.id} write, "
            "together; leave it out"
        )
    if ranks == (range(10**7),) or not record.num_ranks:
        return ranks
    for one in ranks:
        if one.start < first or one.stop - 1 > last:
            absent = one.start if one.start < first else one.stop - 1
            raise LaunchError(f"--rank: there is no rank {absent}; {record.name} has {first} to {last}")
        hidden = next((rank for rank in one if not record.shows(rank)), None)
        if hidden is not None:
            files = ", ".join(map(str, log_files_of(job, hidden)))
            where = f"it is in {files}" if files else "start the job with --log_dir to keep it"
            raise LaunchError(
                f"--rank: {record.name} does not show what rank {hidden} writes (--tee or "
                f"--enable_each_rank_log); {where}"
            )
    return ranks
