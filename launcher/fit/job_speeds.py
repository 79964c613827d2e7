"""The speeds that the step of a job is timed by: those of a data sheet, or those measured on its hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..inputs.host_list import folded
from ..job.mesh import HostSlots
from ..wording import count
from .answer import Rehearsed
from .devices import Gpu
from .measured_speeds import MEASURE, ClusterSpeeds
from .past_run import factors_of
from .speeds import SpeedRange, speeds_of_sheet
from .step_time import TimeRange, times_of

# How far a step may be from its time by measured speeds, without and with a run of this cluster that was
# compared: docs/reference/plan-accuracy.md has the layouts that show it.
TOLERANCE, TOLERANCE_AFTER_RUN = 0.5, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpeeds:
    """Speeds for one job. `measured` None: those of a data sheet."""

    speeds: SpeedRange
    factors: Mapping[str, float]  # by part of a step: what runs took of what was predicted
    measured: ClusterSpeeds | None = None
    path: Path | None = None
    notes: tuple[str, ...] = ()  # for the lines below the verdict

    @property
    def tolerance(self) -> float | None:
        """Return how far a step may be from its time; None for a range."""
        if self.measured is None:
            return None
        return TOLERANCE_AFTER_RUN if self.factors else TOLERANCE

    @property
    def source(self) -> str:
        """Return where the speeds are from, for the title of the times."""
        if self.measured is None or self.tolerance is None:
            return "data sheets, not measured"
        return f"speeds measured on {self.measured.day}, right within about {self.tolerance * 100:.0f} %"

    def times(
        self,
        rehearsed: Sequence[Rehearsed],
        hosts: Sequence[HostSlots],
        *,
        num_stages: int,
        with_factors: bool = True,
    ) -> tuple[dict[str, TimeRange], ...]:
        """Return the parts of a step's time of each kind of rank."""
        factors = self.factors if with_factors else {}
        return times_of(rehearsed, self.speeds, hosts, num_stages=num_stages, factors=factors)

    def as_data(self) -> dict[str, Any]:
        """Return where they are from, for JSON."""
        one = self.measured
        return {
            "from": "data sheet" if one is None else "measured",
            "file": None if self.path is None else str(self.path),
            "measured_at": None if one is None else one.measured_at,
            "runs": [] if one is None else [run.job for run in one.runs],
            "factors": dict(self.factors),
            "tolerance": self.tolerance,
        }


def of_sheet(gpu: Gpu) -> JobSpeeds:
    """Return those of a GPU's data sheet."""
    return JobSpeeds(speeds=speeds_of_sheet(gpu), factors={})


def of_measured(cluster: ClusterSpeeds, path: Path, hosts: Sequence[HostSlots]) -> JobSpeeds:
    """Return those that were measured, with what the job's hosts differ in from the measured ones."""
    speeds = cluster.speeds()
    factors = factors_of(cluster.runs)
    names = folded([one.name for one in cluster.hosts])
    runs = f", corrected by {count(len(cluster.runs), 'run')}" if factors else ""
    notes = [f"speeds: measured on {names} on {cluster.day} by {MEASURE}{runs} ({path})"]
    ranks = {one.num_ranks for one in cluster.hosts}
    others = {one.num_ranks for one in hosts} - ranks
    if others:
        there, here = (", ".join(map(str, sorted(each))) for each in (ranks, others))
        notes.append(f"speeds: with {there} ranks at work on each host; this job has {here}, which differs")
    if len(hosts) > 1 and not cluster.between:
        notes.append(
            "speeds: the network between hosts was not measured, and is taken to be as inside a host"
        )
    return JobSpeeds(
        speeds=SpeedRange(speeds, speeds), factors=factors, measured=cluster, path=path, notes=tuple(notes)
    )
