"""`dslaunch attach`: the console of a detached job, as in the terminal that started it."""

from __future__ import annotations

import sys
from typing import Any

import click

from ..errors import LaunchError
from ..options.number import Whole
from ..registry.detached import EXIT_LOST
from ..registry.following import Following
from ..registry.known_jobs import LOST, KnownJob
from ..registry.replay import Choice, Replay
from ..registry.stopping import Stopping
from ..wording import count
from .job_choice import chosen_or_only_job, how_it_ended, refuse_elsewhere
from .logs import refuse_foreground
from .prefix_command import SETTINGS, PrefixCommand

EPILOG = """
\b
Ctrl-C asks what to do:
  d   detach: leave the job alone, and end this command
  s   stop: SIGTERM to the workers, and SIGKILL after the grace
  k   kill the workers now
  g   go on

Without a terminal to ask at it detaches, with exit code 130. Else the exit code is that of the job when the
job ends, 0 after `d`, and 137 if the process of the job was killed.
"""
DEFAULT_TAIL = 100
_QUESTION = "dslaunch: d detach, s stop, k kill now, g go on? "


@click.command(cls=PrefixCommand, epilog=EPILOG, context_settings=SETTINGS)
@click.argument("job", required=False, metavar="[JOB]")
@click.option(
    "--tail",
    type=Whole(),
    default=DEFAULT_TAIL,
    metavar="N",
    help=f"Begin with the last N lines.  [default: {DEFAULT_TAIL}]",
)
def command(**given: Any) -> int:
    """Show what the detached job JOB shows, until it ends."""
    job = chosen_or_only_job(given["job"], "attach")
    refuse_elsewhere(job, "attach")
    refuse_foreground(job, "attach")
    return follow(job, tail=given["tail"])


def follow(job: KnownJob, *, tail: int = DEFAULT_TAIL) -> int:
    """Show what the job shows, from its last lines on, until it ends or the user detaches; return the exit
    code.
    """
    replay = Replay(Choice())
    following = Following(job, replay)
    is_begun = has_ended = False
    while not has_ended:
        try:
            if not is_begun:
                is_begun = True  # set before the work begins: Ctrl-C may come at any moment
                _show_last(following, replay, tail)
            has_ended = not following.step()
            if replay.writer.failure is not None:
                raise replay.writer.failure
        except KeyboardInterrupt:
            code = _ask(following.job, replay)
            if code is not None:
                return code
    replay.writer.drain()
    return _end(following.job)


def _show_last(following: Following, replay: Replay, num_lines: int) -> None:
    num_left_out = following.show_last(num_lines)
    if num_left_out:
        where = f"dslaunch logs {following.job.record.id}"
        replay.say(f"{count(num_left_out, 'line')} came before these: {where}")


def _end(job: KnownJob) -> int:
    if job.why:
        raise LaunchError(how_it_ended(job), exit_code=EXIT_LOST if job.state == LOST else 1)
    return job.record.exit_code


def _ask(job: KnownJob, replay: Replay) -> int | None:
    """Ask the user whether to stop the job, leave it or go on; return the exit code if this command ends
    before the job.
    """
    is_asked = sys.stdin is not None and sys.stdin.isatty() and sys.stderr is not None
    answer = _answer() if is_asked else "d"
    if answer == "d":
        replay.say(f"{job.record.name} goes on; `dslaunch attach {job.record.id}` comes back to it")
        replay.writer.drain()
        return 0 if is_asked else 130
    if answer in ("s", "k"):
        with Stopping(job) as stopping:
            stopping.tell(is_now=answer == "k")
    return None


def _answer() -> str:
    """Return the first letter that the user types; an empty line or a second Ctrl-C means `d`."""
    letter = ""
    while letter not in ("d", "s", "k", "g"):
        try:
            print(f"\n{_QUESTION}", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            line = ""
        if not line:
            print(file=sys.stderr)
            return "d"
        letter = line[:1].lower()
    return letter
