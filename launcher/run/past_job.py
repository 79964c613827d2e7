"""A run that was, held against the plan of its job, and kept with the speeds of its hosts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..fit.finding import FitFinding
from ..fit.measured_speeds import MEASURE
from ..fit.past_run import ToldRun, as_data_beside, compare, lines_beside, told_run
from ..fit.step_time import slowest
from ..page.read_run import read_run
from .find_run import find_run
from .plan_job import PlannedJob
from .speeds_folder import keep_run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBeside:
    """The run, and where it was kept; None: it was not, and `why_not` says why."""

    run: ToldRun
    found: FitFinding
    kept: Path | None
    why_not: str = ""

    def lines(self, columns: int | None = None) -> list[str]:
        """Return what is printed below the job's own answer."""
        found = self.found
        times = slowest(found.times) if found.times else None
        lines = lines_beside(self.run, times, peak_bytes=found.rank_peak_bytes, columns=columns)
        if self.kept is None:
            return [*lines, f"not kept: {self.why_not}"]
        return [*lines, f"kept in {self.kept}: later plans of jobs on these hosts are corrected by it"]

    def as_data(self) -> dict[str, Any]:
        """Return the same for JSON."""
        found = self.found
        times = slowest(found.times) if found.times else None
        told = as_data_beside(self.run, times, peak_bytes=found.rank_peak_bytes)
        return {**told, "kept_in": None if self.kept is None else str(self.kept)}


def read_past_job(word: str) -> ToldRun:
    """Return what the run that this word names has told of its last steps.

    Errors: LaunchError if there is none, or it tells of no steps
    """
    source = find_run(word)
    if source.events is None:
        raise LaunchError(f"--from_run={word}: has a report and no events; give the folder of --log_dir")
    return told_run(read_run(source).state, job=source.label)


def put_beside(job: PlannedJob, found: FitFinding, run: ToldRun) -> RunBeside:
    """Return the run beside the plan, and keep what it took with the speeds of the job's hosts.

    Errors: LaunchError if the run had another number of ranks
    """
    if run.num_ranks != job.plan.world_size:
        raise LaunchError(
            f"--from_run={run.job}: had {run.num_ranks} ranks, and this job has {job.plan.world_size}; plan "
            "the job as it was, with the same hosts"
        )
    speeds = found.speeds
    if speeds is None or speeds.measured is None or speeds.path is None:
        why_not = f"the speeds of these hosts were not measured; {MEASURE} does it"
        return RunBeside(run=run, found=found, kept=None, why_not=why_not)
    plain = job.times(found.rehearsed, speeds, with_factors=False)
    why_not = keep_run(speeds.path, speeds.measured, compare(run, slowest(plain)))
    return RunBeside(run=run, found=found, kept=None if why_not else speeds.path, why_not=why_not)
