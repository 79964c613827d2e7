"""A job whose processes MPI or Slurm starts."""

from __future__ import annotations

from ..external.runner import plan_owned, run_owned
from ..job.plan import Plan, origins_of
from ..options import Options
from ..output.console import Console
from ..output.job_report import BegunAttempt
from .outcome import end_job, noted
from .show_plan import show_plan, warn_of_plan


def run_owned_job(options: Options, plan: Plan, console: Console) -> int:
    """Run it, or print its plan; return the exit code. Errors: LaunchError"""
    plan, job = plan_owned(options, plan)
    if options.dry_run:
        from ..job.plan_text import describe

        return show_plan(plan, f"{describe(plan, how=f'by {job.argv[0]}')}\n{job.describe()}", console)
    warn_of_plan(plan, console)
    begun = BegunAttempt(hosts=plan.host_names)
    console.register(origins_of(plan))
    verdict = run_owned(job, console)
    console.report(verdict, took_s=begun.duration_s, written=options.report or "")
    return end_job(options, (noted(begun.end(verdict), console),), console)
