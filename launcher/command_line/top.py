"""`dslaunch top`: a job on a screen that changes."""

from __future__ import annotations

import sys
from typing import Any

import click

from ..top.once import frame_text, glyphs_for
from ..top.terminal import require_package, why_no_screen
from ..top.view import View
from ..top.watched import Watched
from .job_choice import chosen_or_only_job, refuse_elsewhere
from .prefix_command import SETTINGS, PrefixCommand

EPILOG = """
\b
Examples:
  dslaunch top
      the one job that runs here: its steps, its losses, what each rank does and waits for
  dslaunch top --once train | head -3
      how far the job `train` is, once

The screen needs the package textual: pip install '.[watch]' in a clone of dslaunch. --once does not, and is
what is printed where there is no terminal. `?` shows the keys; `q` ends the screen, and never the job.
"""


@click.command(cls=PrefixCommand, epilog=EPILOG, context_settings=SETTINGS)
@click.argument("job", required=False, metavar="[JOB]")
@click.option("--once", is_flag=True, help="Print one frame as plain text, and end.")
def command(**given: Any) -> int:
    """Watch the job JOB, or the one that runs here."""
    job = chosen_or_only_job(given["job"], "top")
    refuse_elsewhere(job, "top")
    if given["once"] or why_no_screen():
        watched = Watched(job)
        click.echo(frame_text(watched, View()), nl=False)
        watched.close()
        return 0
    require_package("dslaunch top", instead=f"; `dslaunch top --once {job.record.id}` does without it")
    from ..top.screen import show

    outcome = show(job, glyphs=glyphs_for(sys.stdout.encoding))
    return 128 + outcome.signal if outcome.signal else 0
