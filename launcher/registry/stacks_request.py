"""Asks a job for the stacks of its ranks; the job shows the answer, and has it in its events."""

from __future__ import annotations

import signal

from ..errors import LaunchError
from ..node.workers.stack_dump import catches
from ..options.backend import LAUNCHERS
from .known_jobs import KnownJob
from .record import JobState
from .stopping import job_process


def ask_stacks(job: KnownJob) -> None:
    """Ask. Errors: LaunchError if it has no ranks that could be asked, or has ended"""
    record = job.record
    with job_process(job) as process:
        why = ""
        if record.launcher in LAUNCHERS and LAUNCHERS[record.launcher].starts_itself:
            why = f"has its ranks started by {record.launcher}, which dslaunch cannot ask"
        elif record.state is JobState.STARTING or not catches(process.pid, signal.SIGQUIT):
            why = "has not begun to start its ranks, or is ending"
        if why:
            raise LaunchError(f"dslaunch stacks: {record.id} {why}; look at the ranks on their hosts")
        process.signal(signal.SIGQUIT)
