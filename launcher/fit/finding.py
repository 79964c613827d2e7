"""The output of `dslaunch plan`: the verdict, its notes and the tables, or all of it as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...shared.axes import AXES
from ..job.mesh import JobMesh
from .answer import DEVICE, PLACES, Peak, Rehearsed, RunPhase, StepWork, crosses
from .candidates import Candidate
from .job_speeds import JobSpeeds
from .lengths import PlannedLengths
from .step_time import TimeRange
from .tables import describe
from .verdict import OUTSIDE_BYTES, FitVerdict, HostUse, JobMemory, gib, hosts_used, judge
from .ways_out import WayOut, ways_text


@dataclass(frozen=True, slots=True, kw_only=True)
class FitFinding:
    """Everything that was found of a job."""

    device: str  # the GPU's name, or "CPU"
    device_from: str  # the source of its memory
    rehearsed: tuple[Rehearsed, ...]
    memory: JobMemory
    verdict: FitVerdict
    uses: tuple[HostUse, ...]
    times: tuple[Mapping[str, TimeRange], ...] = ()  # one for each kind of rank; empty: speeds are not known
    speeds: JobSpeeds | None = None  # speeds that the times are by
    given: Candidate | None = None  # the configuration of the job, where it was compared with others
    ways_out: tuple[WayOut, ...] = ()
    lengths: PlannedLengths | None = None  # what --lengths says of the samples

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the lines below the verdict: what was assumed, guessed, and not judged."""
        return (*self.verdict.notes, *(() if self.lengths is None else self.lengths.notes()))

    @property
    def line(self) -> str:
        """Return the verdict, with what would fit where the job does not."""
        text = "" if self.given is None else ways_text(self.given, self.ways_out)
        return f"{self.verdict.line}; {text}" if text else self.verdict.line

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes of tensors on a GPU, of all ranks."""
        worst = (one.answer.worst(DEVICE) for one in self.rehearsed)
        return max((one.peak(DEVICE).num_bytes for one in worst if one is not None), default=0)

    @property
    def rank_peak_bytes(self) -> int:
        """Return the most memory of a rank: of its GPU, as torch counts it, or of its process."""
        if self.memory.device_bytes is not None:
            return self.peak_bytes
        most = max((one.answer.host_bytes for one in self.rehearsed), default=0)
        return most + self.memory.process_bytes

    @property
    def mesh(self) -> JobMesh | None:
        """Return how the program divides its ranks; None where that was not found."""
        return self.rehearsed[0].answer.mesh

    @property
    def rank_bytes(self) -> int:
        """Return what the fullest GPU needs; without GPUs the host memory of the largest rank."""
        if self.memory.device_bytes is not None:
            return self.peak_bytes + OUTSIDE_BYTES
        return max(one.answer.host_bytes for one in self.rehearsed) + self.memory.process_bytes

    @property
    def rank_room(self) -> int | None:
        """Return what there is of that memory; None: it is not known."""
        if self.memory.device_bytes is not None:
            return self.memory.device_bytes
        known = zip(self.memory.hosts, self.memory.host_bytes, strict=True)
        return min((total // host.num_ranks for host, total in known if total is not None), default=None)

    def lines(self, columns: int | None = None) -> list[str]:
        """Return the verdict, the device, the notes and the tables, for a terminal of so many columns."""
        total = self.memory.device_bytes
        device = [] if total is None else [f"each GPU: {self.device}, {gib(total)} ({self.device_from})"]
        mesh = self.mesh
        return [
            self.line,
            *device,
            *([] if mesh is None or not mesh.place(0) else [f"mesh of the program: {mesh.text}"]),
            *([] if self.speeds is None else self.speeds.notes),
            *self.notes,
            *describe(
                self.rehearsed,
                self.uses,
                self.memory.hosts,
                has_gpus=total is not None,
                times=self.times,
                times_from="" if self.speeds is None else self.speeds.source,
                columns=columns,
            ),
        ]

    def as_data(self) -> dict[str, Any]:
        """Return all numbers for JSON; docs/train/will-it-fit.md names the keys."""
        hosts = self.memory.hosts
        return {
            "fits": self.verdict.fits,
            "verdict": self.line,
            "ways_out": [one.as_data() for one in self.ways_out],
            "notes": list(self.notes),
            "device": {
                "name": self.device,
                "memory_bytes": self.memory.device_bytes,
                "memory_from": self.device_from,
                "outside_of_torch_bytes": None if self.memory.device_bytes is None else OUTSIDE_BYTES,
            },
            "mesh": None if self.mesh is None else {axis: self.mesh.size(axis) for axis in AXES},
            "process_bytes": self.memory.process_bytes,
            "lengths": None if self.lengths is None else self.lengths.as_data(),
            "hosts": [
                {
                    "name": one.name,
                    "ranks": one.num_ranks,
                    "needed_bytes": one.needed_bytes,
                    "memory_bytes": one.total_bytes,
                    "kinds": dict(one.kinds),
                }
                for one in self.uses
            ],
            "ranks": [
                _rank(one, [_step(work, hosts) for work in one.answer.steps]) for one in self.rehearsed
            ],
            "step_seconds": [
                {part: {"low": one.low, "high": one.high} for part, one in parts.items()}
                for parts in self.times
            ],
            "speeds": None if self.speeds is None else self.speeds.as_data(),
        }


def finding_of(
    rehearsed: Iterable[Rehearsed],
    memory: JobMemory,
    *,
    device: str,
    device_from: str,
    times: Sequence[Mapping[str, TimeRange]] = (),
    speeds: JobSpeeds | None = None,
    lengths: PlannedLengths | None = None,
) -> FitFinding:
    """Judge what was rehearsed; `times`: the parts of a step's time, of each kind of rank, by `speeds`."""
    found = tuple(rehearsed)
    return FitFinding(
        device=device,
        device_from=device_from,
        rehearsed=found,
        memory=memory,
        verdict=judge(found, memory),
        uses=hosts_used(found, memory),
        times=tuple(times),
        speeds=speeds,
        lengths=lengths,
    )


def _rank(one: Rehearsed, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "place": one.place,
        "alike": list(one.alike),
        "model": dict(one.answer.model),
        "phases": [_phase(stretch) for stretch in one.answer.stretches],
        "curve": [{"clock": clock, "bytes": dict(kinds)} for clock, kinds in one.answer.curve],
        "steps": list(steps),
        "file_bytes": dict(one.answer.file_bytes),
        "guesses": [{"line": line, "what": what} for line, what in one.answer.guesses],
    }


def _phase(stretch: RunPhase) -> dict[str, Any]:
    peaks = {place: _peak(stretch.peak(place)) for place in PLACES}
    return {
        "name": stretch.name,
        "clock": stretch.clock,
        "peaks": {key: one for key, one in peaks.items() if one},
    }


def _peak(peak: Peak) -> dict[str, Any]:
    if not peak.num_bytes:
        return {}
    return {"bytes": peak.num_bytes, "kinds": dict(peak.kinds), "module": peak.module}


def _step(work: StepWork, hosts: Sequence[Any]) -> dict[str, Any]:
    return {
        "on_device": [
            {
                "dtype": one.dtype,
                "flops": one.flops,
                "moved_bytes": one.moved_bytes,
                "num_kernels": one.num_kernels,
                "is_update": one.is_update,
            }
            for one in work.on_device
        ],
        "host_bytes": work.host_bytes,
        "copied_bytes": dict(work.copied_bytes),
        "update_copied_bytes": dict(work.update_copied_bytes),
        "sent": [
            {
                "axis": one.axis,
                "ranks": list(one.ranks),
                "bytes": dict(one.kinds),
                "number": dict(one.number),
                "update_bytes": dict(one.update_kinds),
                "is_between_hosts": crosses(one.ranks, hosts),
            }
            for one in work.sent
        ],
    }
