"""`dslaunch drill`: the options of a job, in whose run faults are made."""

from __future__ import annotations

import json
from copy import copy
from typing import Any

import click

from ...shared.table import terminal_columns
from ..controller.job_signals import ended_in_order
from ..errors import LaunchError
from ..options.number import Seconds, Whole
from .cli import dslaunch, job_options
from .prefix_command import PROGRAM_SETTINGS, PrefixCommand

# Options of a job that is run in another way, or in the background.
NOT_OURS = ("dry_run", "version", "detach", "watch", "no_ssh", "autotuning")
EXIT_NOT_BACK = 1
EPILOG = """
\b
Examples:
  dslaunch drill train.py
      two faults of a rank on this machine, and how long each takes until the next step
  dslaunch drill -H hosts --spares 1 --fault rank-killed,host-killed --json train.py
      on these hosts with a spare, as JSON

\b
Faults, of the highest rank or of its host:
  rank-raises   a KeyboardInterrupt           host-killed   its agent and its ranks are killed
  rank-killed   SIGKILL                       host-frozen   they are stopped: the host is silent
  rank-hangs    it is stopped, and the others wait until a collective's time limit

All options of a job are allowed but for those of one in the background; `dslaunch help all` shows them. The
job is started once, and starts again after each fault. It is ended after the last one: let it write its
checkpoints where they are not missed. Its steps must be known: by an engine, or dslaunch.report(step=...).

The exit code is 0 if the job has trained again after each fault, 1 if not, and 2 for a mistake.
"""


def _faults(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Return the names of a list. Errors: LaunchError for a name that is none"""
    if value is None:
        return ()
    from ..run.drill_job import FAULTS

    names = tuple(word.strip() for word in value.split(","))
    for name in names:
        if name not in FAULTS:
            import difflib

            near = difflib.get_close_matches(name, FAULTS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise LaunchError(f"--fault {name}: is no fault; {hint}There are {', '.join(FAULTS)}")
    return names


@click.command(
    cls=PrefixCommand,
    groups={"Options": ("fault", "steps", "limit", "as_json", "verbose", "help")},
    epilog=EPILOG,
    context_settings=PROGRAM_SETTINGS,
)
@click.option(
    "--fault",
    callback=_faults,
    metavar="NAME,...",
    help="Make these faults, in this order.  [default: rank-raises, rank-killed, and host-killed where a "
    "rank runs on another host]",
)
@click.option(
    "--steps", type=Whole(1), default=10, metavar="N", help="Train N steps before each.  [default: 10]"
)
@click.option(
    "--limit",
    type=Seconds(1),
    default=300.0,
    metavar="S",
    help="Wait S seconds at most for those steps, and for the next one after a fault.  [default: 300]",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything that was measured as JSON.")
@click.option("--verbose", is_flag=True, help="Show what the job prints.")
@ended_in_order()
def command(**given: Any) -> int:
    """Make faults in a run of SCRIPT, and tell how long the job takes until it trains again, stage by
    stage.
    """
    if not given["script"]:
        raise click.UsageError("which script? Write: dslaunch drill [options] script.py [its arguments]")
    from ..run.drill_job import DrillRequest, drill

    request = DrillRequest(
        faults=given["fault"],
        steps=given["steps"],
        limit_s=given["limit"],
        is_verbose=given["verbose"],
        say=lambda text: click.echo(f"dslaunch: {text}", err=True),
    )
    given["max_restarts"] = given["max_restarts"] or 1  # it starts again after each fault
    found = drill(job_options(given), request)
    if given["as_json"]:
        click.echo(json.dumps(found.as_data(), indent=2).encode())
    else:
        click.echo("\n".join(found.lines(terminal_columns())).encode())
    return 0 if found.is_well else EXIT_NOT_BACK


command.params[:0] = [one for one in dslaunch.params[:-2] if one.name not in NOT_OURS]
_script = copy(dslaunch.params[-2])
_script.metavar = "SCRIPT"  # the script is required here; the usage of a job shows it as optional
command.params += [_script, dslaunch.params[-1]]
