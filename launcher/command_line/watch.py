"""`dslaunch --watch`: a job that is started as with --detach, and shown until it ends."""

from __future__ import annotations

import sys

import click

from ..errors import LaunchError
from ..options import Options
from ..output.console import LAST_WORDS_S, Console
from ..registry.following import now_of
from ..registry.known_jobs import find_job
from ..run.run_detached import start_detached
from ..run.run_job import run_with
from ..top.once import glyphs_for
from ..top.terminal import require_package, why_no_screen
from .attach import follow
from .job_choice import how_it_ended

LAST_LINES = 20  # shown when the job has ended


def watch(options: Options) -> int:
    """Start the job and show it; the exit code is the job's, or 0 if the user leaves it running.

    Errors: LaunchError for a mistake in the options, for a failure of the job before its start, and without
    a screen
    """
    if why := why_no_screen():
        raise LaunchError(f"--watch cannot show the job: {why}; leave it out, or start the job with --detach")
    require_package("--watch", instead=", or start the job with --detach")
    started = start_detached(options, run_with)
    if not started.name:
        return started.code
    from ..top.screen import show

    job = find_job(started.id)
    outcome = show(job, is_watch=True, glyphs=glyphs_for(sys.stdout.encoding))
    if outcome.signal:
        return 128 + outcome.signal
    if outcome.word == "quit":
        click.echo(started.name)
        return 0
    code = follow(job, tail=LAST_LINES) if outcome.word == "ended" else follow(job)
    ended = now_of(job)
    if outcome.word == "ended" and not ended.why:
        console = Console(log_level=options.log_level)
        console.say(how_it_ended(ended))
        console.drain(LAST_WORDS_S)
    return code
