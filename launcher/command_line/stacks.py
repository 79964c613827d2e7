"""`dslaunch stacks`: ask a running `dslaunch` for the stacks of its ranks."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import click

from ..errors import LaunchError
from .prefix_command import SETTINGS, PrefixCommand

EPILOG = """
\b
Example:
  dslaunch stacks 4711
      the dslaunch with this process id prints what each rank does, where it prints everything else

The same happens at Ctrl-\\ in its terminal. Ranks show their Python stacks if the job was started with
--stack_on_hang, or if their host has py-spy.
"""


@click.command(cls=PrefixCommand, epilog=EPILOG, context_settings=SETTINGS)
@click.argument("pid", required=False, metavar="PID")
def command(**given: Any) -> int:
    """Have the dslaunch with process id PID print what each of its ranks does. The job goes on."""
    word: str | None = given["pid"]
    if word is None or not re.fullmatch("[1-9][0-9]{0,9}", word):
        raise LaunchError(
            f"{'which job' if word is None else repr(word) + ' is no process id'}? Write: dslaunch stacks "
            "PID, PID being that of the dslaunch that runs the job; `pgrep -af dslaunch` shows it"
        )
    pid = int(word)
    if not _is_launcher(pid):
        raise LaunchError(
            f"{pid}: no dslaunch that runs a job has this process id here; look with `pgrep -af dslaunch`"
        )
    os.kill(pid, signal.SIGQUIT)
    click.echo(f"dslaunch: process {pid} was asked; it prints the stacks where the job's own output goes")
    return 0


def _is_launcher(pid: int) -> bool:
    """Only a dslaunch that handles the signal: any other program would die of it."""
    from ..node.stack_dump import catches  # here, so that --help does not load what only this needs

    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    is_ours = any(word.rpartition(b"/")[2] == b"dslaunch" for word in words[:4])
    return is_ours and catches(pid, signal.SIGQUIT) and catches(pid, signal.SIGUSR1)
