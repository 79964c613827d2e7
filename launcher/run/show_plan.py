"""The plan of a job, as --dry_run prints it, and warnings about it."""

from __future__ import annotations

import os

import click

from ..inputs.rank_set import format_ranks
from ..job.gateways import gateways_of, plan_groups
from ..job.mesh import warnings_of
from ..job.plan import Plan, overruled
from ..job.restart import Attempt
from ..job.trace_ranks import traced_ranks
from ..options import Options
from ..output.console import LAST_WORDS_S, Console
from .exec_prefix import lost_input
from .make_plan import make_plan


def show_job(options: Options, first: Attempt, console: Console) -> int:
    """Print the plan of a job whose processes we start ourselves."""
    plan = make_plan(options, first)
    gateways = gateways_of(plan_groups(plan.all_nodes, options.tree))
    from ..job.plan_text import describe

    text = describe(plan, gateways=gateways)
    if options.sync.folder is not None:
        from .job_files import describe_sync

        text += f"\n{describe_sync(options, plan)}"
    if first.spares:
        text += f"\nspares: {', '.join(one.host.name for one in first.spares)}"
    if options.trace.is_on:
        ranks = format_ranks(rank for node in plan.nodes for rank in traced_ranks(node))
        text += f"\ntraced: step {options.trace.steps} of rank {ranks}"
    if options.check.is_on:
        text += "\nfirst all hosts are looked at, and unfit ones left out if the job may (--check)"
    return show_plan(plan, text, console)


def show_plan(plan: Plan, text: str, console: Console) -> int:
    warn_of_plan(plan, console)
    if why_not := _why_no_script(plan):  # a start reports it for each host
        console.warn(why_not)
    console.drain(LAST_WORDS_S)
    click.echo(text.encode())  # UTF-8 in every locale
    return 0


def _why_no_script(plan: Plan) -> str:
    """Return why the script cannot be run, where that is known without a look at a host; else empty."""
    script = plan.program.script
    hosts = [node.host for node in plan.nodes if node.is_local]
    is_here = len(hosts) == len(plan.nodes) and not any(one.cwd or one.exec_prefix for one in hosts)
    if script is None or not is_here or plan.cwd != os.getcwd():
        return ""
    from ..node.workers.preparation import why_no_script

    return why_no_script(script)


def warn_of_plan(plan: Plan, console: Console) -> None:
    if unread := lost_input(plan):
        console.warn(unread)
    for line in () if plan.mesh is None else warnings_of(plan.mesh, plan.host_slots):
        console.warn(line)
    for entry in overruled(plan):
        console.warn(
            f"{entry.source}: {entry.name} is not used: every rank gets its own from dslaunch; leave it out"
        )
