"""`dslaunch env`: the options of a job, and what its ranks would get."""

from __future__ import annotations

from copy import copy
from typing import Any

import click

from ..errors import LaunchError
from ..options.number import Whole
from ..wording import count
from .cli import dslaunch, job_options
from .prefix_command import PROGRAM_SETTINGS, PrefixCommand

NOT_OURS = ("dry_run", "report", "version", "autotuning")
EPILOG = """
\b
Example:
  dslaunch env -H hosts --rank 0 train.py
      every variable that rank 0 of `dslaunch -H hosts train.py` gets, each with the file and line it is from

All options of a job are allowed; `dslaunch help all` shows them.

Values of variables whose names contain KEY, TOKEN, SECRET, PASSW or CREDENTIAL are shown as ***.
No host is contacted, so nothing is said of what a host sets by itself.
"""


@click.command(
    cls=PrefixCommand,
    groups={"Options": ("rank", "show_secrets", "help")},
    epilog=EPILOG,
    context_settings=PROGRAM_SETTINGS,
)
@click.option("--rank", type=Whole(), metavar="N", help="Show the variables of this rank only.")
@click.option("--show_secrets", is_flag=True, help="Show the values of secrets too.")
def command(**given: Any) -> int:
    """Show which variables each rank of a job would get, and where each comes from."""
    if not given["script"]:
        raise click.UsageError("which script? Write: dslaunch env [options] script.py [its arguments]")
    from ..job.rank_environment import describe
    from ..output.console import Console
    from ..run.make_plan import choose_attempt, make_plan

    options = job_options({**given, "dry_run": True, "report": None})
    plan = make_plan(options, choose_attempt(options, Console(log_level=options.log_level), may_look=False))
    rank = given["rank"]
    if rank is not None and rank >= plan.world_size:
        raise LaunchError(
            f"--rank={rank}: the job has {count(plan.world_size, 'rank')}; give 0 to {plan.world_size - 1}"
        )
    click.echo(describe(plan, only_rank=rank, shows_secrets=given["show_secrets"]).encode())
    return 0


command.params[:0] = [one for one in dslaunch.params[:-2] if one.name not in NOT_OURS]
_script = copy(dslaunch.params[-2])
_script.metavar = "SCRIPT"  # the script is required here; the usage of a job shows it as optional
command.params += [_script, dslaunch.params[-1]]
