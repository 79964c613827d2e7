"""The processes of a job, seen from outside: how to find them and look at them."""

from __future__ import annotations

from typing import NamedTuple

from .number import Seconds, Whole
from .option import flag, option, record


@record
class ProcessOptions(NamedTuple):
    """The ways to find the processes of a job and to look at them from outside."""

    saves_pid: bool = flag(
        "--save_pid",
        topic="deepspeed",
        help="On every host, keep the agent's process id in /tmp/PID.deepspeed, PID being that of dslaunch.",
    )
    # Seconds of silence after which stacks are shown; None or 0: only on request
    stack_on_hang_s: float | None = option(
        "--stack_on_hang",
        topic="output",
        type=Seconds(),
        metavar="S",
        help=(
            "If no rank writes anything for S seconds, print the Python stacks of all, and go on.  [default: "
            "0, only when asked, by `dslaunch stacks JOB` or Ctrl-\\]"
        ),
    )
    # the rank that reads our stdin; None: the only rank, if it runs on this machine
    stdin_rank: int | None = option(
        "--stdin",
        topic="start",
        type=Whole(),
        metavar="RANK",
        help=(
            "Let this rank, which must run on this machine, read what dslaunch reads: for a debugger, or a "
            "pipe.  [default: the only rank of a job on this machine]"
        ),
    )
    gives_stdin: bool = True
