"""`dslaunch stacks`: ask a running `dslaunch` for the stacks of its ranks."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import click

from ..errors import LaunchError
from ..node.workers.stack_dump import catches
from ..registry.following import POLL_S, now_of
from ..registry.journal_reader import JournalReader
from ..registry.known_jobs import KnownJob
from ..registry.replay import Choice, Replay
from ..registry.stacks_request import ask_stacks
from .job_choice import chosen_or_only_job, how_it_ended, next_of_name, refuse_elsewhere
from .prefix_command import SETTINGS, PrefixCommand

EPILOG = """
\b
Examples:
  dslaunch stacks train
      what each rank of the job train does; of a job in the foreground it is printed there
  dslaunch stacks 4711
      the same of the dslaunch with this process id

The same happens at Ctrl-\\ in its terminal. Ranks that run Python show their stacks; of others the
kernel says what they do.
"""
ANSWER_WITHIN_S = 30.0  # longer than the 20 s that the job gives its hosts


@click.command(cls=PrefixCommand, epilog=EPILOG, context_settings=SETTINGS)
@click.argument("job", required=False, metavar="[JOB]")
def command(**given: Any) -> int:
    """Have the job JOB, a name or the process id of its dslaunch, print what each of its ranks is doing. The
    job goes on.
    """
    word: str | None = given["job"]
    is_pid = word is not None and re.fullmatch("[1-9][0-9]{0,9}", word) is not None
    try:
        job = chosen_or_only_job(word, "stacks")
    except LaunchError:
        if word is None or not is_pid:
            raise
        return _ask_process(int(word))  # a dslaunch process that keeps no record
    return _ask_job(job)


def _ask_process(pid: int) -> int:
    try:
        # the descriptor makes sure that the process that is checked is the one that gets the signal
        process: int | None = os.pidfd_open(pid)
    except OSError:
        process = None  # no such process, or a kernel without such descriptors
    if not _is_launcher(pid):
        raise LaunchError(
            f"{pid}: no dslaunch that runs a job has this process id here; `dslaunch jobs` lists them"
        )
    if process is None:
        os.kill(pid, signal.SIGQUIT)
    else:
        signal.pidfd_send_signal(process, signal.SIGQUIT)
    _tell_place(pid)
    return 0


def _tell_place(pid: int) -> None:
    click.echo(f"dslaunch: process {pid} was asked; it prints the stacks where the job's own output goes")


def _ask_job(job: KnownJob) -> int:
    """Ask a detached job, and show its answer.

    Errors: LaunchError if it has no ranks that could be asked
    """
    refuse_elsewhere(job, "stacks")
    record = job.record
    if not job.is_live:
        raise LaunchError(f"{how_it_ended(job)}{next_of_name(job, 'stacks')}")
    reader = JournalReader(job.folder)
    for _ in reader.entries():
        pass
    ask_stacks(job)
    if not record.is_detached:
        _tell_place(record.pid)
        return 0
    replay = Replay(Choice(has_ranks=False))
    deadline = time.monotonic() + ANSWER_WITHIN_S
    while time.monotonic() < deadline:
        for one in reader.entries():
            if one[0] == "a":
                replay.writer.drain()
                return 0
            replay.show([one])
        if not now_of(job).is_live:
            break
        time.sleep(POLL_S)
    replay.writer.drain()
    raise LaunchError(f"dslaunch stacks: no rank of {record.id} runs that could answer", exit_code=1)


def _is_launcher(pid: int) -> bool:
    """Tell whether the process is a dslaunch that handles the signal, which would end any other program."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    is_ours = any(word.rpartition(b"/")[2] == b"dslaunch" for word in words[:4])
    return is_ours and catches(pid, signal.SIGQUIT) and catches(pid, signal.SIGUSR1)
