"""This node's part of a job that is started on every node."""

from __future__ import annotations

import os

from ..job.restart import Attempt
from ..job.trace_ranks import traced_ranks
from ..options import Options
from ..output.console import Console
from ..output.job_report import BegunAttempt
from ..rendezvous.node_part import check_options, plan_part, run_part, where_its_words_are
from ..sync.sync_job import SyncJob
from .host_pool import read_pool, select_hosts
from .make_plan import make_plan
from .outcome import end_job, forget_trace, noted, show_timings, write_trace_of
from .show_plan import show_plan, warn_of_plan


def run_part_of_job(options: Options, console: Console) -> int:
    """Run it, or print its plan; return the exit code. Errors: LaunchError"""
    check_options(options, console)
    pool = read_pool(options, console)
    selected = select_hosts(pool.hosts, options)
    options.logs.check(sum(len(one.devices) for one in selected))
    plan = make_plan(options, Attempt(hosts=selected, run_id="", hosts_from=pool.found_in))
    part = plan_part(options, plan, pool=[host.name for host in pool.hosts], environ=os.environ)
    if options.dry_run:
        from ..job.plan_text import describe

        return show_plan(
            part.plan, f"{describe(part.plan, how='by its own dslaunch')}\n{part.describe()}", console
        )
    warn_of_plan(part.plan, console)
    begun = BegunAttempt(hosts=part.plan.host_names)
    files = None
    if options.trace.is_on and traced_ranks(part.node):
        from .job_files import trace_files_of

        files = SyncJob(trace=trace_files_of(options))
    try:
        verdict = run_part(part, console, files)
        write_trace_of(options, part.own_plan, files, console, verdict, node_rank=part.node.node_rank)
    finally:
        forget_trace(files)
    if options.start.shows_timings:
        show_timings(verdict, console)
    console.report(verdict, took_s=begun.duration_s, written=options.report or "")
    if where := where_its_words_are(verdict, part):
        console.error(where)
    return end_job(options, (noted(begun.end(verdict), console),), console)
