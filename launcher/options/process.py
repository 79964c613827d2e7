"""How the processes of a job are found and looked at from outside."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from .number import Seconds, Whole


class ProcessOptions(NamedTuple):
    """How the processes of a job are found and looked at from outside."""

    saves_pid: bool = False
    stack_on_hang_s: float | None = None  # of silence; None or 0: only when asked for
    stdin_rank: int | None = None  # who reads our stdin; None: the only rank, if it runs on this machine
    gives_stdin: bool = True


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--save_pid"],
        is_flag=True,
        help="On every host, keep the agent's process id in /tmp/PID.deepspeed, PID being that of dslaunch.",
    ),
    click.Option(
        ["--stack_on_hang"],
        type=Seconds(),
        metavar="S",
        help=(
            "If no rank writes anything for S seconds, print the Python stacks of all, and go on.  [default: "
            "0, only when asked, by `dslaunch stacks JOB` or Ctrl-\\]"
        ),
    ),
    click.Option(
        ["--stdin"],
        type=Whole(),
        metavar="RANK",
        help=(
            "Let this rank, which must run on this machine, read what dslaunch reads: for a debugger, or a "
            "pipe.  [default: the only rank of a job on this machine]"
        ),
    ),
)


def read(given: dict[str, Any]) -> ProcessOptions:
    """The options of this file from all that were given, by parameter name."""
    return ProcessOptions(
        saves_pid=given["save_pid"], stack_on_hang_s=given["stack_on_hang"], stdin_rank=given["stdin"]
    )
